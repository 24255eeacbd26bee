package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/bench"
)

// sessionsOptions of the program.
type sessionsOptions struct {
	calls, connections int
	idle               int
	rest               time.Duration
	profiles           string
}

// stage is one part of the program: a server of its own, and what is done to it.
type stage struct {
	name string
	args []string // of serve
	n    int
	run  func(context.Context, *environment, *daemon, *sessionsOptions, *problems) error
}

func runSessions(ctx context.Context, e *environment, args []string) error {
	var o sessionsOptions
	f := e.flags("sessions")
	f.IntVar(&o.calls, "calls", 1000, "`sessions` with a call of 1 MiB each in flight at the same time")
	f.IntVar(&o.connections, "connections", 8, "connections of those")
	f.IntVar(&o.idle, "idle", 10000, "`sessions` that are idle, 125 on a connection")
	f.DurationVar(&o.rest, "rest", 20*time.Second, "how long they are")
	f.StringVar(&o.profiles, "profiles", "", "write profiles of the server, at its fullest, to this `folder`")
	if err := e.ready(ctx, f, args); err != nil {
		return err
	}
	if o.connections < 1 || (o.calls+o.connections-1)/o.connections > streams {
		return fmt.Errorf("stress: %d sessions on %d connections; a server takes %d on one", o.calls, o.connections, streams)
	}
	fmt.Fprintln(e.out, bench.ThisMachine())
	var p problems
	for _, s := range []stage{
		// On allowance a tensor waits whole, so the budget has room for all: what was
		// promised, and the block of each run.
		{"in flight, on allowance", []string{"--memory", fmt.Sprint(o.calls*(2*mib+128*kib) + 64*mib)}, o.calls, callsInFlight},
		// On credit a quarter of them has memory, and the others wait for it.
		{"in flight, on credit", []string{"--allowance", "64KiB", "--memory", fmt.Sprint(o.calls*(256+128)*kib + 32*mib)}, o.calls, callsInFlight},
		// The budget has room for a fiftieth of what is promised to all: an idle
		// session's promise is taken back when another needs it, and who finds no room
		// goes without.
		{"idle", []string{"--memory", fmt.Sprint(o.idle*16*kib + 64*mib)}, o.idle, idleSessions},
	} {
		if s.n == 0 {
			continue
		}
		if err := s.measure(ctx, e, &o, &p); err != nil {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			p.add("%s: %v", s.name, err)
		}
	}
	return e.verdict("sessions", p.all())
}

// measure runs one stage and holds the server to what it may take.
func (s *stage) measure(ctx context.Context, e *environment, o *sessionsOptions, p *problems) (err error) {
	d, err := e.serve(ctx, append(s.args, "--metrics", "127.0.0.1:0", "--pprof")...)
	if err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, d.stop())
		p.log(d.log)
	}()
	empty, err := d.scrape(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintf(e.out, "\n%s: %d sessions\n", s.name, s.n)
	begin := time.Now()
	if err := s.run(ctx, e, d, o, p); err != nil {
		return err
	}
	fmt.Fprintf(e.out, "  took             %v, no error of any session\n", time.Since(begin).Round(time.Millisecond))
	after, err := d.until(ctx, "empty", func(f figures) bool {
		return f["tensorferry_sessions"] == 0 && f["tensorferry_memory_used_bytes"] == 0 && f["go_goroutines"] <= empty["go_goroutines"]+2 &&
			f["process_open_fds"] <= empty["process_open_fds"]
	})
	if err != nil {
		return err
	}
	_, peak, err := d.rss()
	if err != nil {
		return err
	}
	granted, limit := after["tensorferry_memory_peak_bytes"], after["tensorferry_memory_limit_bytes"]
	fmt.Fprintf(e.out, "  after they ended %v goroutines, %v descriptors, as before\n", after["go_goroutines"], after["process_open_fds"])
	fmt.Fprintf(e.out, "  budget           %s granted at most, of %s\n", mibs(granted), mibs(limit))
	fmt.Fprintf(e.out, "  RSS at most      %s; allowed %s and the budget: %s\n", mibs(peak), mibs(spareRSS), mibs(spareRSS+limit))
	if peak > spareRSS+limit {
		p.add("%s: the server took %s, %s more than allowed", s.name, mibs(peak), mibs(peak-spareRSS-limit))
	}
	return nil
}

// full prints what the server is like at its fullest.
func (o *sessionsOptions) full(ctx context.Context, e *environment, d *daemon, name, when string) error {
	f, err := d.scrape(ctx)
	if err != nil {
		return err
	}
	now, _, err := d.rss()
	if err != nil {
		return err
	}
	fmt.Fprintf(e.out, "  %-16s %v sessions, %v calls, %v goroutines, %v descriptors, RSS %s, heap %s in use, stacks %s, budget %s\n", when,
		f["tensorferry_sessions"], f["tensorferry_calls"], f["go_goroutines"], f["process_open_fds"], mibs(now),
		mibs(f["go_memstats_heap_inuse_bytes"]), mibs(f["go_memstats_stack_inuse_bytes"]), mibs(f["tensorferry_memory_used_bytes"]))
	if o.profiles == "" {
		return nil
	}
	return errors.Join(d.profile(ctx, "heap?gc=1", filepath.Join(o.profiles, name+".heap")),
		d.profile(ctx, "goroutine?debug=1", filepath.Join(o.profiles, name+".goroutines")))
}

// group is sessions over a number of connections.
type group struct {
	clients  []*client.Client
	sessions []*client.Session
}

// open opens n sessions over so many connections.
func open(ctx context.Context, address string, n, connections int, cfg client.Config) (*group, error) {
	g := &group{sessions: make([]*client.Session, n)}
	for range connections {
		c, err := client.Dial(address, cfg)
		if err != nil {
			return nil, errors.Join(err, g.close())
		}
		g.clients = append(g.clients, c)
	}
	err := each(n, openers, func(i int) (err error) {
		g.sessions[i], err = g.clients[i%connections].Session(ctx)
		return err
	})
	if err != nil {
		return nil, errors.Join(err, g.close())
	}
	return g, nil
}

func (g *group) close() error {
	return each(len(g.clients), len(g.clients), func(i int) error { return g.clients[i].Close() })
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
type held struct {
	data []byte
	at   int
	let  <-chan struct{}
}

// Read copies into p.
func (h *held) Read(p []byte) (int, error) {
	half := len(h.data) / 2
	if h.at == len(h.data) {
		return 0, io.EOF
	}
	end := len(h.data)
	if h.at < half {
		end = half
	} else {
		<-h.let
	}
	n := copy(p, h.data[h.at:end])
	h.at += n
	return n, nil
}

// callsInFlight has a call of 1 MiB on every session, half of it sent, at one time.
func callsInFlight(ctx context.Context, e *environment, d *daemon, o *sessionsOptions, _ *problems) error {
	g, err := open(ctx, d.address, o.calls, o.connections, client.Config{ChunkBytes: 64 * kib})
	if err != nil {
		return err
	}
	let := make(chan struct{})
	done := make(chan error, 1)
	go func() { // ends with the calls
		done <- each(o.calls, o.calls, func(i int) error {
			w := pick(uint64(i), mib)
			model, want := "echo", w.data()
			if i%2 == 1 {
				model, want = "relu", w.relu()
			}
			c, err := g.sessions[i].Call(ctx, client.Request{Model: model, Inputs: []client.Input{
				client.FromReader("", w.desc(), &held{data: w.data(), let: let}),
			}})
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
	_, err = d.until(ctx, "all calls open", func(f figures) bool { return f["tensorferry_calls"] == float64(o.calls) })
	if err == nil {
		err = o.full(ctx, e, d, fmt.Sprintf("calls-%d", o.calls), "all in flight")
	}
	close(let)
	return errors.Join(err, <-done, g.close())
}

// idleSessions opens sessions, has each make a small call, and leaves them alone.
func idleSessions(ctx context.Context, e *environment, d *daemon, o *sessionsOptions, _ *problems) error {
	g, err := open(ctx, d.address, o.idle, (o.idle+124)/125, client.Config{})
	if err != nil {
		return err
	}
	small := func(i int) error {
		w := pick(uint64(i), 4*kib)
		y, err := g.sessions[i].Compute(ctx, "echo", tensorOf(w))
		if err != nil {
			return err
		}
		return same("echo", y.Data, w.data())
	}
	err = each(o.idle, openers, small)
	if err == nil {
		err = errors.Join(o.full(ctx, e, d, "fresh", "after their calls"), pause(ctx, o.rest))
	}
	if err == nil {
		err = o.full(ctx, e, d, "idle", fmt.Sprintf("after %v", o.rest))
	}
	if err == nil { // they are as alive as before
		err = each(o.idle, openers, small)
	}
	return errors.Join(err, g.close())
}
