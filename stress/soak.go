package main

import (
	"bytes"
	"context"
	crypto "crypto/rand"
	"errors"
	"fmt"
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

	"google.golang.org/grpc/credentials"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/proc"
	"github.com/tensorferry/tensorferry/stress/known"
)

const (
	// sampleEvery is how often everything comes to rest for a moment and is looked at.
	sampleEvery = 10 * time.Second
	// warmUp is how long memory may grow; growth is judged from then on.
	warmUp = 2 * time.Minute
	// judgedFrom is the shortest run whose memory is judged: one that warms up whole.
	judgedFrom = 4 * warmUp
	// share of growth that is none, beside what follows.
	share = 0.05
	// warmCalls are made on each session that stays, so that what it opens is open.
	warmCalls = 5
	// workers is how many things are done at a time.
	workers = 8
	// jobWait bounds one job, so that a sample can not wait longer.
	jobWait = 60 * time.Second
)

// judged are the figures of a sample, what each may have more in the end, and for some
// at any time than before the load.
var judged = []struct {
	name   string
	slack  float64
	memory bool
	atRest bool
}{
	{"goroutines", 4, false, true},
	{"descriptors", 2, false, true},
	{"gone files", 2, false, false}, // mapped, and nobody can open them any more
	{"heap", 4 * mib, true, false},
	{"RSS, used", 16 * mib, true, false},
	{"budget", 4 * mib, true, false},
}

// sample is what one process is like when everything rests: the figures by name.
type sample struct {
	at time.Duration
	of figures
}

// history are the samples of one process; the first is from before the load.
type history struct {
	name    string
	look    func(context.Context) (figures, error)
	samples []sample
}

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
	credentials credentials.TransportCredentials // nil: plain
	perRPC      credentials.PerRPCCredentials
	clients     []*client.Client
	sessions    []*client.Session // one for each client, for as long as all this runs

	mu  sync.Mutex
	cut map[string]known.Window // pushes that were cut off; guarded by mu
}

func runSoak(ctx context.Context, e *environment) error {
	if e.lasts == 0 {
		e.lasts = 20 * time.Minute
	}
	s := &soak{environment: e, done: make(map[string]*atomic.Int64)}
	for _, name := range s.secured() {
		if name != "folder" && name != "memory" {
			return fmt.Errorf("-tls %q; known are folder and memory", name)
		}
	}
	fmt.Fprintf(e.out, "seed %d, %v, %d workers, TLS to %q\n", e.seed, e.lasts, workers, s.secured())
	s.histories = []*history{{name: "clients", look: s.self}}
	for _, j := range jobs {
		s.done[j.name] = new(atomic.Int64)
	}
	err := s.run(ctx)
	for _, t := range s.targets {
		for _, c := range t.clients {
			err = errors.Join(err, c.Close())
		}
		_, e := t.until(ctx, "without a session", func(f figures) bool { return f["tensorferry_sessions"] == 0 })
		err = errors.Join(err, e, t.Stop())
	}
	return err
}

func (s *soak) run(ctx context.Context) error {
	for _, store := range [][2]string{{"folder", filepath.Join(s.dir, "store")}, {"memory", "memory:1GiB"}} {
		t := &target{cut: make(map[string]known.Window)}
		flags := []string{"--metrics", "127.0.0.1:0", "--pprof", "--slow", "--memory", "256MiB", "--store", store[1]}
		if slices.Contains(s.secured(), store[0]) {
			more, err := t.secure(filepath.Join(s.dir, "tls-"+store[0]))
			if err != nil {
				return err
			}
			flags = append(flags, more...)
		}
		var err error
		if t.daemon, err = s.serve(ctx, flags...); err != nil {
			return err
		}
		t.history = &history{name: store[0], look: t.atRest}
		s.targets, s.histories = append(s.targets, t), append(s.histories, t.history)
		for _, cfg := range []client.Config{{}, {Codec: codec.LZ4}, {ChunkBytes: 64 * kib, Checksum: codec.CRC32}} {
			cfg.Credentials, cfg.PerRPC = t.credentials, t.perRPC
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
			for range warmCalls { // lanes are opened for those who send something large
				_, err := session.Compute(ctx, "echo", known.Pick(0, 8*mib).Tensor())
				if err == nil { // on the session that pushes and pulls use
					_, err = c.Compute(ctx, "echo", known.Pick(0, 8*mib).Tensor())
				}
				if err != nil {
					return err
				}
			}
		}
	}
	s.began = time.Now()
	err := s.look(ctx)
	if err != nil {
		return err
	}
	s.histories[0].samples[0].of["goroutines"] += workers
	loaded, stop := context.WithTimeout(ctx, s.lasts)
	defer stop()
	var all sync.WaitGroup
	var crew [workers]*worker
	for i := range crew {
		crew[i] = &worker{soak: s, rand: rand.New(rand.NewPCG(s.seed, uint64(i))), prefix: fmt.Sprintf("soak/%d/", i), stored: make(map[*target]map[string]*known.Window)}
		for _, t := range s.targets {
			crew[i].stored[t] = make(map[string]*known.Window)
		}
		all.Go(func() { crew[i].work(ctx, loaded) })
	}
	for pause(loaded, min(sampleEvery, s.lasts/8)) == nil && err == nil {
		err = s.look(ctx)
	}
	stop()
	all.Wait()
	for _, w := range crew {
		for _, t := range s.targets {
			if e := w.globs(ctx, visit{target: t, client: t.clients[0]}); e != nil {
				s.add("in the end: %s: %v", t.name, e)
			}
		}
	}
	s.growth(s.lasts)
	return err
}

// secured names the stores whose servers are reached over TLS.
func (e *environment) secured() []string {
	return strings.FieldsFunc(e.tls, func(r rune) bool { return r == ',' })
}

// secure makes certificates and a token in a folder, has clients use them, and returns
// the flags of the server.
func (t *target) secure(dir string) ([]string, error) {
	_, err := identity.WriteCertificates(dir, nil, "soak")
	token := filepath.Join(dir, "token")
	if err == nil {
		err = os.WriteFile(token, []byte(crypto.Text()), 0o600)
	}
	if err == nil {
		t.credentials, t.perRPC, err = identity.ClientFiles{CA: filepath.Join(dir, identity.AuthorityFile), Token: token}.Credentials()
	}
	return []string{
		"--tls-cert", filepath.Join(dir, identity.ServerFile), "--tls-key", filepath.Join(dir, identity.ServerKeyFile), "--token-file", token,
	}, err
}

// look brings everything to rest, and looks at every process.
func (s *soak) look(ctx context.Context) error {
	at, first := time.Since(s.began).Round(time.Second), len(s.histories[0].samples) == 0
	for _, t := range s.targets {
		if f, err := t.scrape(ctx); err != nil {
			return err
		} else if !first {
			fmt.Fprintf(s.out, "%v, %s under load: %v\n", at, t.name, f)
		}
	}
	s.rest.Lock()
	defer s.rest.Unlock()
	for _, h := range s.histories {
		f, err := h.look(ctx)
		if err != nil {
			return fmt.Errorf("%v: %s: %w", at, h.name, err)
		}
		h.samples = append(h.samples, sample{at, f})
		fmt.Fprintf(s.out, "%v, %s at rest:", at, h.name)
		for _, j := range judged {
			fmt.Fprintf(s.out, " %s %s,", j.name, show(f[j.name], j.memory))
			if over := f[j.name] - h.samples[0].of[j.name]; j.atRest && over > j.slack {
				s.add("%v: %s: %v %s more than before the load", at, h.name, over, j.name)
			}
		}
		fmt.Fprintf(s.out, " RSS %s of its own, %s of it spare, and %s mapped\n", mibs(f["own"]), mibs(f["spare"]), mibs(f["mapped"]))
	}
	var tally []string
	for _, j := range jobs {
		tally = append(tally, fmt.Sprintf("%s %d", j.name, s.done[j.name].Load()))
	}
	fmt.Fprintf(s.out, "%v, done so far: %s; refused as busy %d\n", at, strings.Join(tally, ", "), s.busy.Load())
	return nil
}

func show(v float64, memory bool) string {
	if memory {
		return mibs(v)
	}
	return fmt.Sprint(v)
}

// atRest is a sample of the server when nothing but the sessions that stay is open.
func (t *target) atRest(ctx context.Context) (figures, error) {
	quiet := func(f figures) bool {
		few := true
		if len(t.samples) > 0 {
			before := t.samples[0].of
			few = f["go_goroutines"] <= before["goroutines"]+judged[0].slack && f["process_open_fds"] <= before["descriptors"]+judged[1].slack
		}
		return few && f["tensorferry_sessions"] == float64(len(t.sessions)+len(t.clients)) && f["tensorferry_calls"] == 0 && f["tensorferry_open_transfers"] == 0
	}
	_, err := t.until(ctx, "at rest", quiet)
	if err == nil {
		err = t.sweep(ctx)
	}
	for range 2 { // the garbage collector runs; what a sync.Pool holds goes with the second
		if err == nil {
			_, err = t.get(ctx, "/debug/pprof/heap?gc=1")
		}
	}
	if err != nil {
		return nil, err
	}
	f, err := t.until(ctx, "at rest again", quiet)
	if err != nil {
		return nil, err
	}
	return resident(t.Process.Pid, figures{
		"goroutines": f["go_goroutines"], "descriptors": f["process_open_fds"],
		"heap": f["go_memstats_heap_alloc_bytes"], "budget": f["tensorferry_memory_used_bytes"],
		"spare": f["tensorferry_memory_kept_bytes"] + f["go_memstats_heap_idle_bytes"] - f["go_memstats_heap_released_bytes"],
	})
}

// self is a sample of this process.
func (s *soak) self(context.Context) (figures, error) {
	runtime.GC()         // so that the heap of a sample is what lives, not what the collector has not got to
	debug.FreeOSMemory() // the results of calls come and go by tens of MiB
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return nil, err
	}
	spare := float64(m.HeapIdle - m.HeapReleased)
	for _, t := range s.targets {
		for _, c := range t.clients {
			spare += float64(c.Kept())
		}
	}
	return resident(os.Getpid(), figures{
		"goroutines": float64(runtime.NumGoroutine()), "descriptors": float64(len(fds)), "heap": float64(m.HeapAlloc), "spare": spare,
	})
}

// resident adds to f what the system says of a process. What f has as spare is in RSS
// and in use by nobody: kept for the next call, or the runtime's.
func resident(pid int, f figures) (figures, error) {
	r, err := proc.ResidentOf(pid)
	maps, e := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	gone := bytes.Count(maps, []byte(".safetensors (deleted)\n"))
	f["own"], f["mapped"], f["gone files"] = float64(r.Own), float64(r.Mapped), float64(gone)
	f["RSS, used"] = f["own"] - f["spare"]
	return f, errors.Join(err, e)
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
		got, err := known.Pull(ctx, t.clients[0], st.Name)
		if err == nil {
			err = w.Is(&got[0])
		}
		if err == nil {
			_, err = t.clients[0].Delete(ctx, st.Name)
		}
		if err != nil {
			return err
		}
	}
	clear(t.cut)
	return nil
}

// growth compares the last quarter with the time after the warm-up.
func (s *soak) growth(length time.Duration) {
	warm := min(warmUp, length/4)
	fmt.Fprintf(s.out, "\nmedians at rest, %v to %v and since %v; at most %.0f %% more, and a constant:\n", warm, 2*warm, length*3/4, share*100)
	for _, h := range s.histories {
		for _, j := range judged {
			before, n := h.median(warm, 2*warm, j.name)
			after, m := h.median(length*3/4, 1<<62, j.name)
			from, to, word := show(before, j.memory), show(after, j.memory), "no growth"
			switch {
			case length < judgedFrom && (j.memory || n == 0 || m == 0):
				word = fmt.Sprintf("not judged below %v", judgedFrom)
			case n == 0 || m == 0:
				word = "NOT SEEN"
				s.add("%s: %d samples before and %d after are too few", h.name, n, m)
			case after > before*(1+share)+j.slack:
				word = "GROWS"
				s.add("%s: %s grows from %s to %s", h.name, j.name, from, to)
			}
			fmt.Fprintf(s.out, "  %-8s%-12s%12s%12s  %s\n", h.name, j.name, from, to, word)
		}
	}
}

// median of what the samples from one time to another have, and their number.
func (h *history) median(from, to time.Duration, name string) (float64, int) {
	var list []float64
	for _, n := range h.samples {
		if n.at >= from && n.at <= to {
			list = append(list, n.of[name])
		}
	}
	if len(list) == 0 {
		return 0, 0
	}
	return bench.Quantile(list, 0.5), len(list)
}
