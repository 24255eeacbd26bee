package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/proc"
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
	// workers is how many things are done at a time.
	workers = 8
	// jobWait bounds one job, so that a sample can not wait longer.
	jobWait = 60 * time.Second
)

// soak is servers under mixed load.
type soak struct {
	*environment
	targets []*target
	// histories are that of this process, and that of each target.
	histories []*history
	began     time.Time

	rest sync.RWMutex // held for reading by whoever works
	done map[string]*atomic.Int64
	busy atomic.Int64 // calls refused with a time to come back
}

// target is one server.
type target struct {
	*daemon
	*history
	clients  []*client.Client
	sessions []*client.Session // one for each client, for as long as all this runs

	mu  sync.Mutex
	cut map[string]window // pushes that were cut off; guarded by mu
}

// sample is what one process is like when everything rests.
type sample struct {
	at                                  time.Duration
	goroutines, descriptors, gone, heap float64 // gone are mapped files that nobody can open any more
	rss, mapped                         float64 // of its own, and pages of files
	budget                              float64 // granted; of a server
	spare                               float64 // in RSS and in use by nobody: kept for the next call, or the runtime's
}

// history are the samples of one process; the first is from before the load.
type history struct {
	name    string
	samples []sample
}

func runSoak(ctx context.Context, e *environment, args []string) error {
	f := e.flags("soak")
	length := f.Duration("for", 20*time.Minute, "how `long`")
	seed := f.Uint64("seed", uint64(time.Now().UnixNano()), "of what is done")
	if err := e.ready(ctx, f, args); err != nil {
		return err
	}
	fmt.Fprintf(e.out, "seed %d, %v, %d workers\n", *seed, *length, workers)
	s := &soak{environment: e, done: make(map[string]*atomic.Int64), histories: []*history{{name: "clients"}}}
	for _, j := range jobs {
		s.done[j.name] = new(atomic.Int64)
	}
	err := s.run(ctx, *length, *seed)
	for _, t := range s.targets {
		err = errors.Join(err, t.end(ctx))
	}
	return e.verdict(ctx, "soak", err)
}

func (s *soak) run(ctx context.Context, length time.Duration, seed uint64) error {
	for _, store := range [][2]string{{"folder", filepath.Join(s.dir, "store")}, {"memory", "memory:1GiB"}} {
		d, err := s.serve(ctx, "--metrics", "127.0.0.1:0", "--pprof", "--slow", "--memory", memory, "--store", store[1])
		if err != nil {
			return err
		}
		t := &target{daemon: d, history: &history{name: store[0]}, cut: make(map[string]window)}
		s.targets, s.histories = append(s.targets, t), append(s.histories, t.history)
		if err := t.connect(ctx); err != nil {
			return err
		}
	}
	base() // made before memory is looked at
	s.began = time.Now()
	err := s.look(ctx)
	if err != nil {
		return err
	}
	s.histories[0].samples[0].goroutines += workers
	loaded, stop := context.WithTimeout(ctx, length)
	defer stop()
	var all sync.WaitGroup
	var crew [workers]*worker
	for i := range crew {
		crew[i] = &worker{soak: s, rand: rand.New(rand.NewPCG(seed, uint64(i))), prefix: fmt.Sprintf("soak/%d/", i), stored: make(map[place]*window)}
		all.Go(func() { crew[i].work(ctx, loaded) })
	}
	every := min(sampleEvery, length/8)
	for pause(loaded, every) == nil && err == nil {
		err = s.look(ctx)
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
	return err
}

// connect opens what stays open.
func (t *target) connect(ctx context.Context) error {
	for _, cfg := range []client.Config{{}, {Codec: codec.LZ4}, {ChunkBytes: 64 * kib, Checksum: codec.CRC32}} {
		c, err := client.Dial(t.address, cfg)
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
func (t *target) end(ctx context.Context) (err error) {
	for _, c := range t.clients {
		err = errors.Join(err, c.Close())
	}
	_, e := t.until(ctx, "without a session", func(f figures) bool { return f["tensorferry_sessions"] == 0 })
	return errors.Join(err, e, t.Stop())
}

// look brings everything to rest, and looks at every process.
func (s *soak) look(ctx context.Context) error {
	at, mine := time.Since(s.began).Round(time.Second), s.histories[0]
	first := len(mine.samples) == 0
	if !first {
		fmt.Fprintf(s.out, "%v\n", at)
		for _, t := range s.targets {
			f, err := t.scrape(ctx)
			if err != nil {
				return err
			}
			fmt.Fprintf(s.out, "  %-7s under load  %v\n", t.name, f)
		}
	}
	s.rest.Lock()
	defer s.rest.Unlock()
	for _, t := range s.targets {
		n, err := t.look(ctx)
		if err != nil {
			return fmt.Errorf("%v: %s: %w", at, t.name, err)
		}
		n.at = at
		t.samples = append(t.samples, n)
	}
	own, err := s.self()
	if err != nil {
		return err
	}
	own.at = at
	mine.samples = append(mine.samples, own)
	if first {
		return nil
	}
	for _, h := range s.histories {
		base, n := h.samples[0], h.samples[len(h.samples)-1]
		fmt.Fprintf(s.out, "  %-7s at rest  %v goroutines, %v descriptors, %v files mapped that are gone, RSS %s of its own, %s of it spare, and %s mapped, heap %s, budget %s\n",
			h.name, n.goroutines, n.descriptors, n.gone, mibs(n.rss), mibs(n.spare), mibs(n.mapped), mibs(n.heap), mibs(n.budget))
		if over := n.goroutines - base.goroutines; over > restGoroutines {
			s.add("%v: %s: %v goroutines more than before the load", at, h.name, over)
		}
		if over := n.descriptors - base.descriptors; over > restDescriptors {
			s.add("%v: %s: %v descriptors more than before the load", at, h.name, over)
		}
	}
	var tally []string
	for _, j := range jobs {
		tally = append(tally, fmt.Sprintf("%s %d", j.name, s.done[j.name].Load()))
	}
	fmt.Fprintf(s.out, "  done so far %s; refused as busy %d\n", strings.Join(tally, ", "), s.busy.Load())
	return nil
}

// look waits until nothing but the sessions that stay is open on the server.
func (t *target) look(ctx context.Context) (n sample, err error) {
	base := sample{goroutines: math.Inf(1), descriptors: math.Inf(1)}
	if len(t.samples) > 0 {
		base = t.samples[0]
	}
	quiet := func(f figures) bool {
		return f["tensorferry_sessions"] == float64(len(t.sessions)) && f["tensorferry_calls"] == 0 && f["tensorferry_open_transfers"] == 0 &&
			f["go_goroutines"] <= base.goroutines+restGoroutines && f["process_open_fds"] <= base.descriptors+restDescriptors
	}
	if _, err := t.until(ctx, "at rest", quiet); err != nil {
		return n, err
	}
	if err := t.sweep(ctx); err != nil {
		return n, err
	}
	for range 2 { // the garbage collector runs; what a sync.Pool holds goes with the second
		if _, err := t.get(ctx, "/debug/pprof/heap?gc=1"); err != nil {
			return n, err
		}
	}
	f, err := t.until(ctx, "at rest again", quiet)
	if err != nil {
		return n, err
	}
	n = sample{
		goroutines: f["go_goroutines"], descriptors: f["process_open_fds"],
		heap: f["go_memstats_heap_alloc_bytes"], budget: f["tensorferry_memory_used_bytes"],
		spare: f["tensorferry_memory_kept_bytes"] + f["go_memstats_heap_idle_bytes"] - f["go_memstats_heap_released_bytes"],
	}
	return n, n.resident(t.Process.Pid)
}

// resident adds what the system says of a process.
func (n *sample) resident(pid int) error {
	r, err := proc.ResidentOf(pid)
	gone, e := proc.Deleted(pid, ".safetensors")
	n.rss, n.mapped, n.gone = float64(r.Own), float64(r.Mapped), float64(gone)
	return errors.Join(err, e)
}

// self is a sample of this process.
func (s *soak) self() (sample, error) {
	runtime.GC()         // so that the heap of a sample is what lives, not what the collector has not got to
	debug.FreeOSMemory() // the results of calls come and go by tens of MiB
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	fds, err := proc.Descriptors()
	n := sample{
		goroutines: float64(runtime.NumGoroutine()), descriptors: float64(fds),
		heap: float64(m.HeapAlloc), spare: float64(m.HeapIdle - m.HeapReleased),
	}
	for _, t := range s.targets {
		for _, c := range t.clients {
			n.spare += float64(c.Kept())
		}
	}
	return n, errors.Join(err, n.resident(os.Getpid()))
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
		if err := w.is(&got[0]); err != nil {
			return err
		}
		if _, err := t.clients[0].Delete(ctx, st.Name); err != nil {
			return err
		}
	}
	clear(t.cut)
	return nil
}

// judge compares the last quarter with the time after the warm-up.
func (s *soak) judge(length time.Duration) {
	warm := min(warmUp, length/4)
	fmt.Fprintf(s.out, "\nmedians at rest, %v to %v and since %v; at most %.0f %% more, and a constant:\n", warm, 2*warm, length*3/4, share*100)
	for _, h := range s.histories {
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
			{"RSS, used", func(n sample) float64 { return n.rss - n.spare }, 16 * mib, true},
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
