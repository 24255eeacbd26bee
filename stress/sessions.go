package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/proc"
	"github.com/tensorferry/tensorferry/stress/known"
)

// stage is one part of the program: sessions at a server of their own.
type stage struct {
	*environment
	*daemon
	n        int
	sessions []*client.Session
}

func runSessions(ctx context.Context, e *environment) (err error) {
	for _, s := range []struct {
		name   string
		n      int
		serve  []string
		chunks int
		run    func(*stage, context.Context) error
	}{
		// On allowance a tensor waits whole, so the budget has room for all: what was
		// promised, and the block of each run.
		{"in flight, on allowance", e.calls, []string{"--memory", fmt.Sprint(e.calls*(2*mib+128*kib) + 64*mib)}, 64 * kib, (*stage).inFlight},
		// On credit a quarter of them has memory, and the others wait for it.
		{"in flight, on credit", e.calls, []string{"--allowance", "64KiB", "--memory", fmt.Sprint(e.calls*(256+128)*kib + 32*mib)}, 64 * kib, (*stage).inFlight},
		// The budget has room for a fiftieth of what is promised to all: an idle
		// session's promise is taken back when another needs it, and who finds no room
		// goes without.
		{"idle", e.idle, []string{"--memory", fmt.Sprint(e.idle*16*kib + 64*mib)}, 0, (*stage).atRest},
	} {
		fmt.Fprintf(e.out, "\n%s: %d sessions\n", s.name, s.n)
		d, failed := e.serve(ctx, append(s.serve, "--metrics", "127.0.0.1:0", "--pprof")...)
		if failed == nil {
			failed = (&stage{environment: e, daemon: d, n: s.n}).measure(ctx, s.chunks, s.run)
			failed = errors.Join(failed, d.Stop())
		}
		if failed != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", s.name, failed))
		}
	}
	return err
}

// measure runs a stage and holds the server to what it may take.
func (s *stage) measure(ctx context.Context, chunks int, run func(*stage, context.Context) error) error {
	empty, err := s.scrape(ctx)
	if err != nil {
		return err
	}
	begin := time.Now()
	if err := s.open(ctx, client.Config{ChunkBytes: chunks}, run); err != nil {
		return err
	}
	fmt.Fprintf(s.out, "  took             %v, no error of any session\n", time.Since(begin).Round(time.Millisecond))
	after, err := s.until(ctx, "empty", func(f figures) bool {
		return f["tensorferry_sessions"] == 0 && f["tensorferry_memory_used_bytes"] == 0 && f["go_goroutines"] <= empty["go_goroutines"]+2 &&
			f["process_open_fds"] <= empty["process_open_fds"]
	})
	if err != nil {
		return err
	}
	memory, err := proc.ResidentOf(s.Process.Pid)
	if err != nil {
		return err
	}
	peak, limit := float64(memory.Peak), after["tensorferry_memory_limit_bytes"]+after["tensorferry_receive_limit_bytes"]
	spare := float64(baseRSS + spareReceived + s.n*sessionRSS + (s.n+perConnection-1)/perConnection*connectionRSS)
	fmt.Fprintf(s.out, `  after they ended %v goroutines, %v descriptors, as before
  budget           %s granted at most, of %s
  RSS at most      %s; allowed %s and the budgets: %s
`, after["go_goroutines"], after["process_open_fds"], mibs(after["tensorferry_memory_peak_bytes"]), mibs(limit), mibs(peak), mibs(spare), mibs(spare+limit))
	if peak > spare+limit {
		return fmt.Errorf("the server took %s, %s more than allowed", mibs(peak), mibs(peak-spare-limit))
	}
	return nil
}

// open has the sessions for run, over as many connections as they need.
func (s *stage) open(ctx context.Context, cfg client.Config, run func(*stage, context.Context) error) (err error) {
	clients := make([]*client.Client, (s.n+perConnection-1)/perConnection)
	for i := range clients {
		if clients[i], err = client.Dial(s.address, cfg); err != nil {
			return err
		}
	}
	s.sessions = make([]*client.Session, s.n)
	err = each(s.n, openers, func(i int) (err error) {
		s.sessions[i], err = clients[i/perConnection].Session(ctx)
		return err
	})
	if err == nil {
		err = run(s, ctx)
	}
	return errors.Join(err, each(len(clients), len(clients), func(i int) error { return clients[i].Close() }))
}

// full prints what the server is like at its fullest.
func (s *stage) full(ctx context.Context, when string) error {
	f, err := s.scrape(ctx)
	memory, e := proc.ResidentOf(s.Process.Pid)
	fmt.Fprintf(s.out, "  %-16s %v, RSS %s, heap %s in use, stacks %s\n", when, f, mibs(memory.Own+memory.Mapped),
		mibs(f["go_memstats_heap_inuse_bytes"]), mibs(f["go_memstats_stack_inuse_bytes"]))
	return errors.Join(err, e)
}

// inFlight has a call of 1 MiB on every session, half of it sent, at one time.
func (s *stage) inFlight(ctx context.Context) error {
	let, done := make(chan struct{}), make(chan error, 1)
	go func() { // ends with the calls
		done <- each(s.n, s.n, func(i int) error {
			w := known.Pick(uint64(i), mib)
			model, want := "echo", w.Data()
			if i%2 == 1 {
				model, want = "relu", w.ReLU()
			}
			c, err := s.sessions[i].Call(ctx, client.Request{Model: model, Inputs: []client.Input{client.FromReader("", w.Desc(), known.Held(w.Data(), let))}})
			if err != nil {
				return err
			}
			results, err := c.Wait()
			return errors.Join(err, known.Same(model, results["y"].Data, want))
		})
	}()
	_, err := s.until(ctx, "all calls open", func(f figures) bool { return f["tensorferry_calls"] == float64(s.n) })
	if err == nil {
		err = s.full(ctx, "all in flight")
	}
	close(let)
	return errors.Join(err, <-done)
}

// atRest has each session make a small call, rest, and make another: they are as alive
// as before.
func (s *stage) atRest(ctx context.Context) error {
	small := func() error {
		return each(s.n, openers, func(i int) error {
			w := known.Pick(uint64(i), 4*kib)
			y, err := s.sessions[i].Compute(ctx, "echo", w.Tensor())
			return errors.Join(err, known.Same("echo", y.Data, w.Data()))
		})
	}
	err := small()
	for _, wait := range []time.Duration{0, s.rest} {
		if err == nil {
			err = pause(ctx, wait)
		}
		if err == nil {
			err = s.full(ctx, fmt.Sprintf("after %v", wait))
		}
	}
	if err != nil {
		return err
	}
	return small()
}
