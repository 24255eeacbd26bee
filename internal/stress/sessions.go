package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/proc"
)

// stage is one part of the program: a server of its own, and what is done to it.
type stage struct {
	*environment
	name  string
	n     int           // sessions
	rest  time.Duration // of idle ones
	serve []string      // arguments
	run   func(*stage, context.Context, *daemon) error
}

func runSessions(ctx context.Context, e *environment, args []string) error {
	f := e.flags("sessions")
	calls := f.Int("calls", 1000, "`sessions` with a call of 1 MiB each in flight at the same time")
	idle := f.Int("idle", 10000, "`sessions` that are idle")
	rest := f.Duration("rest", 20*time.Second, "how long they are")
	if err := e.ready(ctx, f, args); err != nil {
		return err
	}
	var err error
	for _, s := range []stage{
		// On allowance a tensor waits whole, so the budget has room for all: what was
		// promised, and the block of each run.
		{e, "in flight, on allowance", *calls, 0, []string{"--memory", fmt.Sprint(*calls*(2*mib+128*kib) + 64*mib)}, (*stage).calls},
		// On credit a quarter of them has memory, and the others wait for it.
		{e, "in flight, on credit", *calls, 0, []string{"--allowance", "64KiB", "--memory", fmt.Sprint(*calls*(256+128)*kib + 32*mib)}, (*stage).calls},
		// The budget has room for a fiftieth of what is promised to all: an idle
		// session's promise is taken back when another needs it, and who finds no room
		// goes without.
		{e, "idle", *idle, *rest, []string{"--memory", fmt.Sprint(*idle*16*kib + 64*mib)}, (*stage).idle},
	} {
		if e := s.measure(ctx); e != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", s.name, e))
		}
	}
	return e.verdict(ctx, "sessions", err)
}

// measure runs one stage and holds the server to what it may take.
func (s *stage) measure(ctx context.Context) (err error) {
	d, err := s.environment.serve(ctx, append(s.serve, "--metrics", "127.0.0.1:0", "--pprof")...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Stop()) }()
	empty, err := d.scrape(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintf(s.out, "\n%s: %d sessions\n", s.name, s.n)
	begin := time.Now()
	if err := s.run(s, ctx, d); err != nil {
		return err
	}
	fmt.Fprintf(s.out, "  took             %v, no error of any session\n", time.Since(begin).Round(time.Millisecond))
	after, err := d.until(ctx, "empty", func(f figures) bool {
		return f["tensorferry_sessions"] == 0 && f["tensorferry_memory_used_bytes"] == 0 && f["go_goroutines"] <= empty["go_goroutines"]+2 &&
			f["process_open_fds"] <= empty["process_open_fds"]
	})
	if err != nil {
		return err
	}
	memory, err := proc.ResidentOf(d.Process.Pid)
	if err != nil {
		return err
	}
	peak, limit := float64(memory.Peak), after["tensorferry_memory_limit_bytes"]+after["tensorferry_receive_limit_bytes"]
	spare := float64(baseRSS + spareReceived + s.n*sessionRSS + (s.n+perConnection-1)/perConnection*connectionRSS)
	fmt.Fprintf(s.out, "  after they ended %v goroutines, %v descriptors, as before\n", after["go_goroutines"], after["process_open_fds"])
	fmt.Fprintf(s.out, "  budget           %s granted at most, of %s\n", mibs(after["tensorferry_memory_peak_bytes"]), mibs(limit))
	fmt.Fprintf(s.out, "  RSS at most      %s; allowed %s and the budgets: %s\n", mibs(peak), mibs(spare), mibs(spare+limit))
	if peak > spare+limit {
		return fmt.Errorf("the server took %s, %s more than allowed", mibs(peak), mibs(peak-spare-limit))
	}
	return nil
}

// full prints what the server is like at its fullest.
func (s *stage) full(ctx context.Context, d *daemon, when string) error {
	f, err := d.scrape(ctx)
	memory, e := proc.ResidentOf(d.Process.Pid)
	fmt.Fprintf(s.out, "  %-16s %v, RSS %s, heap %s in use, stacks %s\n", when, f, mibs(memory.Own+memory.Mapped),
		mibs(f["go_memstats_heap_inuse_bytes"]), mibs(f["go_memstats_stack_inuse_bytes"]))
	return errors.Join(err, e)
}

// open opens the sessions over as many connections as they need, which end closes.
func (s *stage) open(ctx context.Context, address string, cfg client.Config) (sessions []*client.Session, end func() error, err error) {
	clients := make([]*client.Client, (s.n+perConnection-1)/perConnection)
	for i := range clients {
		if clients[i], err = client.Dial(address, cfg); err != nil {
			return nil, nil, err
		}
	}
	sessions = make([]*client.Session, s.n)
	err = each(s.n, openers, func(i int) (err error) {
		sessions[i], err = clients[i/perConnection].Session(ctx)
		return err
	})
	end = func() error { return each(len(clients), len(clients), func(i int) error { return clients[i].Close() }) }
	if err != nil {
		return nil, nil, errors.Join(err, end())
	}
	return sessions, end, nil
}

// each does n things, at most so many at a time, and returns how the first
// failures were.
func each(n, most int, do func(i int) error) error {
	var p problems
	var all sync.WaitGroup
	next := make(chan int)
	for range min(n, most) {
		all.Go(func() { // ends with the last thing
			for i := range next {
				if err := do(i); err != nil {
					p.add("%d: %v", i, err)
				}
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	all.Wait()
	if p.count == 0 {
		return nil
	}
	return fmt.Errorf("%d of %d failed: %v", p.count, n, p.list)
}

// held is a reader whose second half comes when it is let go.
func held(data []byte, let <-chan struct{}) io.Reader {
	half := len(data) / 2
	return io.MultiReader(bytes.NewReader(data[:half]), gate(let), bytes.NewReader(data[half:]))
}

// gate is a reader of nothing, until it is let go.
type gate <-chan struct{}

func (g gate) Read([]byte) (int, error) {
	<-g
	return 0, io.EOF
}

// calls has a call of 1 MiB on every session, half of it sent, at one time.
func (s *stage) calls(ctx context.Context, d *daemon) error {
	sessions, end, err := s.open(ctx, d.address, client.Config{ChunkBytes: 64 * kib})
	if err != nil {
		return err
	}
	let := make(chan struct{})
	done := make(chan error, 1)
	go func() { // ends with the calls
		done <- each(s.n, s.n, func(i int) error {
			w := pick(uint64(i), mib)
			model, want := "echo", w.data()
			if i%2 == 1 {
				model, want = "relu", w.relu()
			}
			c, err := sessions[i].Call(ctx, client.Request{Model: model, Inputs: []client.Input{client.FromReader("", w.desc(), held(w.data(), let))}})
			if err != nil {
				return err
			}
			results, err := c.Wait()
			if err != nil {
				return err
			}
			return same(model, results["y"].Data, want)
		})
	}()
	_, err = d.until(ctx, "all calls open", func(f figures) bool { return f["tensorferry_calls"] == float64(s.n) })
	if err == nil {
		err = s.full(ctx, d, "all in flight")
	}
	close(let)
	return errors.Join(err, <-done, end())
}

// idle opens sessions, has each make a small call, and leaves them alone.
func (s *stage) idle(ctx context.Context, d *daemon) error {
	sessions, end, err := s.open(ctx, d.address, client.Config{})
	if err != nil {
		return err
	}
	small := func(i int) error {
		w := pick(uint64(i), 4*kib)
		y, err := sessions[i].Compute(ctx, "echo", w.tensor())
		if err != nil {
			return err
		}
		return same("echo", y.Data, w.data())
	}
	for _, step := range []func() error{
		func() error { return each(s.n, openers, small) },
		func() error { return s.full(ctx, d, "after their calls") },
		func() error { return pause(ctx, s.rest) },
		func() error { return s.full(ctx, d, fmt.Sprintf("after %v", s.rest)) },
		func() error { return each(s.n, openers, small) }, // they are as alive as before
	} {
		if err == nil {
			err = step()
		}
	}
	return errors.Join(err, end())
}
