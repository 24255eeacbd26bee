package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/bench"
)

const (
	// sampleEvery is how often everything comes to rest for a moment and is looked at.
	sampleEvery = 10 * time.Second
	// warmUp is how long memory may grow; growth is judged from then on.
	warmUp = 2 * time.Minute
	// judgedFrom is the shortest run whose memory is judged: one that warms up whole.
	judgedFrom = 4 * warmUp
	// memory is the servers' budget, and the most that their pools keep.
	memory = "256MiB"
	// share of growth that is none, beside what follows.
	share = 0.05
	// What every process may have more than at rest in the beginning, at any time.
	restGoroutines  = 4
	restDescriptors = 2
	// jobWait bounds one job, so that a sample can not wait longer.
	jobWait = 60 * time.Second
)

// soak is servers under mixed load.
type soak struct {
	*environment
	problems
	targets []*target
	own     history // of this process
	began   time.Time

	rest sync.RWMutex // held for reading by whoever works
	done map[string]*atomic.Int64
	busy atomic.Int64 // calls refused with a time to come back
}

// target is one server.
type target struct {
	name     string
	daemon   *daemon
	clients  []*client.Client
	sessions []*client.Session // one for each client, for as long as all this runs
	history  history

	mu  sync.Mutex
	cut map[string]window // pushes that were cut off; guarded by mu
}

// sample is what one process is like when everything rests.
type sample struct {
	at                            time.Duration
	goroutines, descriptors, heap float64
	resident
	budget float64 // granted; of a server
	spare  float64 // in RSS and in use by nobody: kept for the next call, or the runtime's
}

// history are the samples of one process.
type history struct {
	name    string
	base    sample // before the load
	samples []sample
}

func runSoak(ctx context.Context, e *environment, args []string) error {
	f := e.flags("soak")
	length := f.Duration("for", 20*time.Minute, "how `long`")
	workers := f.Int("workers", 8, "how many `things` are done at a time")
	seed := f.Uint64("seed", uint64(time.Now().UnixNano()), "of what is done")
	if err := e.ready(ctx, f, args); err != nil {
		return err
	}
	fmt.Fprintln(e.out, bench.ThisMachine())
	fmt.Fprintf(e.out, "seed %d, %v, %d workers\n", *seed, *length, *workers)
	s := &soak{environment: e, done: make(map[string]*atomic.Int64), own: history{name: "clients"}}
	for _, j := range jobs {
		s.done[j.name] = new(atomic.Int64)
	}
	err := s.run(ctx, *length, *workers, *seed)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		s.add("%v", err)
	}
	for _, t := range s.targets {
		s.log(t.daemon.log)
	}
	return e.verdict("soak", s.all())
}

func (s *soak) run(ctx context.Context, length time.Duration, workers int, seed uint64) (err error) {
	for name, store := range map[string]string{"folder": filepath.Join(s.dir, "store"), "memory": "memory:1GiB"} {
		d, err := s.serve(ctx, "--metrics", "127.0.0.1:0", "--pprof", "--memory", memory, "--store", store)
		if err != nil {
			return errors.Join(err, s.end(ctx))
		}
		t := &target{name: name, daemon: d, history: history{name: name}, cut: make(map[string]window)}
		s.targets = append(s.targets, t)
		if err := t.connect(ctx); err != nil {
			return errors.Join(err, s.end(ctx))
		}
	}
	slices.SortFunc(s.targets, func(a, b *target) int { return strings.Compare(a.name, b.name) })
	base() // made before memory is looked at
	s.began = time.Now()
	err = s.look(ctx, true)
	if err != nil {
		return errors.Join(err, s.end(ctx))
	}
	s.own.base.goroutines += float64(workers)
	loaded, stop := context.WithTimeout(ctx, length)
	defer stop()
	var all sync.WaitGroup
	crew := make([]*worker, workers)
	for i := range crew {
		crew[i] = newWorker(s, i, rand.New(rand.NewPCG(seed, uint64(i))))
		all.Go(func() { crew[i].work(ctx, loaded) })
	}
	every := min(sampleEvery, length/8)
	for pause(loaded, every) == nil && err == nil {
		err = s.look(ctx, false)
	}
	stop()
	all.Wait()
	for _, w := range crew {
		for _, t := range s.targets {
			if e := w.globs(ctx, t); e != nil {
				s.add("in the end: %s: %v", t.name, e)
			}
		}
	}
	s.judge(length)
	return errors.Join(err, s.end(ctx))
}

// connect opens what stays open.
func (t *target) connect(ctx context.Context) error {
	for _, cfg := range []client.Config{{}, {Codec: codec.LZ4}, {ChunkBytes: 64 * kib, Checksum: codec.CRC32}} {
		c, err := client.Dial(t.daemon.address, cfg)
		if err != nil {
			return err
		}
		t.clients = append(t.clients, c)
		session, err := c.Session(ctx)
		if err != nil {
			return err
		}
		t.sessions = append(t.sessions, session)
	}
	return nil
}

// end closes everything.
func (s *soak) end(ctx context.Context) error {
	var err error
	for _, t := range s.targets {
		for _, c := range t.clients {
			err = errors.Join(err, c.Close())
		}
		_, e := t.daemon.until(ctx, "without a session", func(f figures) bool { return f["tensorferry_sessions"] == 0 })
		err = errors.Join(err, e, t.daemon.stop())
	}
	return err
}

// look brings everything to rest, and looks at every process.
func (s *soak) look(ctx context.Context, first bool) error {
	at := time.Since(s.began)
	var loaded []string
	if !first {
		for _, t := range s.targets {
			f, err := t.daemon.scrape(ctx)
			if err != nil {
				return err
			}
			loaded = append(loaded, fmt.Sprintf("%s: %v sessions, %v calls, %v transfers, %v goroutines, %v descriptors, budget %s", t.name,
				f["tensorferry_sessions"], f["tensorferry_calls"], f["tensorferry_open_transfers"], f["go_goroutines"], f["process_open_fds"],
				mibs(f["tensorferry_memory_used_bytes"])))
		}
	}
	s.rest.Lock()
	defer s.rest.Unlock()
	for _, t := range s.targets {
		if err := t.look(ctx, at, first); err != nil {
			return fmt.Errorf("%v: %s: %w", at.Round(time.Second), t.name, err)
		}
	}
	own, err := s.ownSample(at)
	if err != nil {
		return err
	}
	s.own.add(own, first)
	if first {
		return nil
	}
	fmt.Fprintf(s.out, "%v\n  under load  %s\n", at.Round(time.Second), strings.Join(loaded, "; "))
	for _, h := range s.histories() {
		n := h.samples[len(h.samples)-1]
		fmt.Fprintf(s.out, "  %-7s at rest  %v goroutines, %v descriptors, %v files mapped that are gone, RSS %s of its own, %s of it spare, and %s mapped, heap %s, budget %s\n",
			h.name, n.goroutines, n.descriptors, n.gone, mibs(n.own), mibs(n.spare), mibs(n.mapped), mibs(n.heap), mibs(n.budget))
		if over := n.goroutines - h.base.goroutines; over > restGoroutines {
			s.add("%v: %s: %v goroutines more than before the load", at.Round(time.Second), h.name, over)
		}
		if over := n.descriptors - h.base.descriptors; over > restDescriptors {
			s.add("%v: %s: %v descriptors more than before the load", at.Round(time.Second), h.name, over)
		}
	}
	fmt.Fprintf(s.out, "  done so far %s\n", s.tally())
	return nil
}

func (s *soak) histories() []*history {
	all := []*history{&s.own}
	for _, t := range s.targets {
		all = append(all, &t.history)
	}
	return all
}

// tally says how often each thing was done.
func (s *soak) tally() string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(s.done)) {
		parts = append(parts, fmt.Sprintf("%s %d", name, s.done[name].Load()))
	}
	return strings.Join(parts, ", ") + fmt.Sprintf("; refused for now %d", s.busy.Load())
}

// look waits until nothing but the sessions that stay is open on the server.
func (t *target) look(ctx context.Context, at time.Duration, first bool) error {
	quiet := func(f figures) bool {
		return f["tensorferry_sessions"] == float64(len(t.sessions)) && f["tensorferry_calls"] == 0 && f["tensorferry_open_transfers"] == 0 &&
			(first || f["go_goroutines"] <= t.history.base.goroutines+restGoroutines && f["process_open_fds"] <= t.history.base.descriptors+restDescriptors)
	}
	if _, err := t.daemon.until(ctx, "at rest", quiet); err != nil {
		return err
	}
	if err := t.sweep(ctx); err != nil {
		return err
	}
	for range 2 { // what a sync.Pool holds goes with the second
		if err := t.daemon.collect(ctx); err != nil {
			return err
		}
	}
	f, err := t.daemon.until(ctx, "at rest again", quiet)
	if err != nil {
		return err
	}
	memory, err := residentOf(strconv.Itoa(t.daemon.cmd.Process.Pid))
	if err != nil {
		return err
	}
	t.history.add(sample{at, f["go_goroutines"], f["process_open_fds"], f["go_memstats_heap_alloc_bytes"], memory, f["tensorferry_memory_used_bytes"], f["tensorferry_memory_kept_bytes"] + f["go_memstats_heap_idle_bytes"] - f["go_memstats_heap_released_bytes"]}, first)
	return nil
}

// sweep holds what came of pushes that were cut off to whole or absent, and
// deletes it. Nothing else is open on the server.
func (t *target) sweep(ctx context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	list, _, err := t.clients[0].List(ctx, cutNames+"*")
	if err != nil {
		return err
	}
	for _, st := range list {
		w, tried := t.cut[st.Name]
		if !tried {
			return fmt.Errorf("nobody has pushed %s", st.Name)
		}
		got, err := t.clients[0].Pull(ctx, client.PullRequest{Select: []client.Selection{{Name: st.Name}}})
		if err != nil {
			return err
		}
		if err := same(st.Name, got[0].Data, w.data()); err != nil {
			return err
		}
		if _, err := t.clients[0].Delete(ctx, st.Name); err != nil {
			return err
		}
	}
	clear(t.cut)
	return nil
}

func (h *history) add(n sample, first bool) {
	if first {
		h.base = n
		return
	}
	h.samples = append(h.samples, n)
}

func (s *soak) ownSample(at time.Duration) (sample, error) {
	runtime.GC()
	debug.FreeOSMemory() // the results of calls come and go by tens of MiB
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return sample{}, err
	}
	spare := float64(m.HeapIdle - m.HeapReleased)
	for _, t := range s.targets {
		for _, c := range t.clients {
			spare += float64(c.Kept())
		}
	}
	memory, err := residentOf("self")
	return sample{at: at, spare: spare, goroutines: float64(runtime.NumGoroutine()), descriptors: float64(len(fds)), resident: memory, heap: float64(m.HeapAlloc)}, err
}

// judge compares the last quarter with the time after the warm-up.
func (s *soak) judge(length time.Duration) {
	warm := min(warmUp, length/4)
	fmt.Fprintf(s.out, "\nmedians at rest, %v to %v and since %v; at most %.0f %% more, and a constant:\n", warm, 2*warm, length*3/4, share*100)
	for _, h := range s.histories() {
		for _, c := range []struct {
			what   string
			of     func(sample) float64
			slack  float64
			memory bool
		}{
			{"goroutines", func(n sample) float64 { return n.goroutines }, restGoroutines, false},
			{"descriptors", func(n sample) float64 { return n.descriptors }, restDescriptors, false},
			{"gone files", func(n sample) float64 { return n.gone }, restDescriptors, false},
			{"heap", func(n sample) float64 { return n.heap }, 4 * mib, true},
			{"RSS, used", func(n sample) float64 { return n.own - n.spare }, 16 * mib, true},
			{"budget", func(n sample) float64 { return n.budget }, 4 * mib, true},
		} {
			before, n := h.median(warm, 2*warm, c.of)
			after, m := h.median(length*3/4, 1<<62, c.of)
			show := func(v float64) string {
				if c.memory {
					return mibs(v)
				}
				return fmt.Sprint(v)
			}
			word := "no growth"
			switch {
			case length < judgedFrom && (c.memory || n == 0 || m == 0):
				word = fmt.Sprintf("not judged below %v", judgedFrom)
			case n == 0 || m == 0:
				word = "NOT SEEN"
				s.add("%s: %d samples before and %d after are too few", h.name, n, m)
			case after > before*(1+share)+c.slack:
				word = "GROWS"
				s.add("%s: %s grows from %s to %s", h.name, c.what, show(before), show(after))
			}
			fmt.Fprintf(s.out, "  %-8s%-12s%12s%12s  %s\n", h.name, c.what, show(before), show(after), word)
		}
	}
}

// median of what the samples from one time to another have, and their number.
func (h *history) median(from, to time.Duration, of func(sample) float64) (float64, int) {
	var list []float64
	for _, n := range h.samples {
		if n.at >= from && n.at <= to {
			list = append(list, of(n))
		}
	}
	if len(list) == 0 {
		return 0, 0
	}
	slices.Sort(list)
	return list[len(list)/2], len(list)
}
