package cpu

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// blockOf opens a run of one block for a caller, and fills that.
func blockOf(t *testing.T, who *slab.Principal, m engine.Model, width int64) engine.Run {
	t.Helper()
	d := tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{1, width}}
	r, err := m.Open(t.Context(), engine.Call{Principal: who, Inputs: []engine.Input{{Port: "x", Desc: d, ChunkBytes: width}}})
	if err != nil {
		t.Fatal(err)
	}
	b, err := r.Borrow(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	r.Filled(b)
	return r
}

// takeAll takes what a run computes, and closes it.
func takeAll(t *testing.T, r engine.Run) {
	t.Helper()
	for {
		o, err := r.Next(t.Context())
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Error(err)
			break
		}
		o.Release()
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}

// room returns how many blocks may begin, and how many more if as many callers have an overlong one.
func (p *workers) room() (now, more int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	extra := min(p.overlong, p.n)
	return p.n + extra - p.begun, p.n - extra
}

const (
	wide   = helped + 1
	helped = 64 << 10 // and less is computed by whoever waits for the result
)

func TestABlockThatTakesLongHoldsUpNobodyElse(t *testing.T) {
	hold := make(chan struct{})
	port := []engine.Port{{Name: "x", Shape: []int64{engine.AnyAxes}}}
	for name, model := range map[string]func(h *Host) (engine.Model, error){
		"of rows": RowFunc{
			Info: engine.Info{Name: "rows", Rows: 1, Inputs: port, Outputs: port}, InPlace: true,
			Rows: func(context.Context, RowBlock) error { <-hold; return nil },
		}.Model,
		"of whole tensors": Func{
			Info: engine.Info{Name: "whole", Inputs: port, Outputs: port},
			Call: func(_ context.Context, in []tensor.Tensor, _ map[string]string) ([]tensor.Tensor, error) {
				<-hold
				return in, nil
			},
		}.Model,
	} {
		for _, width := range []int64{1, wide} {
			t.Run(name+"/"+strconv.FormatInt(width, 10), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					hold = make(chan struct{})
					h := NewHost(HostConfig{Workers: 3})
					m, err := model(h)
					if err != nil {
						t.Fatal(err)
					}
					var all sync.WaitGroup
					for range 3 {
						r := blockOf(t, slab.NewPrincipal("sleeper"), m, width)
						all.Go(func() { takeAll(t, r) })
					}
					synctest.Wait()
					if room, _ := h.workers.room(); room != 0 {
						t.Fatalf("there is room for %d blocks", room)
					}
					begin := time.Now()
					for range 100 {
						takeAll(t, blockOf(t, slab.NewPrincipal("other"), byteModel(t, h, 1, true, nil), width))
					}
					if waited := time.Since(begin); waited != blockTime {
						t.Errorf("a hundred calls of others waited for %v, want %v", waited, blockTime)
					}
					close(hold)
					all.Wait()
					synctest.Wait()
					if room, more := h.workers.room(); room != 3 || more != 3 {
						t.Errorf("there is room for %d blocks and %d more", room, more)
					}
					idle(t, h)
					h.Close()
				})
			})
		}
	}
}

func TestOverlongBlocksOfACallerMakeRoomForOneAndThoseOfAllForFew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 3
		h := NewHost(HostConfig{Workers: n})
		defer h.Close()
		hold, held := make(chan struct{}), make(chan struct{})
		sleep := byteModel(t, h, 1, true, func(context.Context, RowBlock) error { <-hold; return nil })
		nap := byteModel(t, h, 1, true, func(context.Context, RowBlock) error { <-held; return nil })
		var all sync.WaitGroup
		open := func(who *slab.Principal, m engine.Model) {
			r := blockOf(t, who, m, wide)
			all.Go(func() { takeAll(t, r) })
			time.Sleep(2 * blockTime)
		}
		free := func(what string, room, more int) {
			t.Helper()
			if r, m := h.workers.room(); r != room || m != more {
				t.Errorf("%s: there is room for %d blocks and %d more, want %d and %d", what, r, m, room, more)
			}
		}
		one := slab.NewPrincipal("one")
		for range n {
			r := blockOf(t, one, sleep, wide)
			all.Go(func() { takeAll(t, r) })
		}
		time.Sleep(10 * blockTime)
		free("three overlong blocks of one caller", 1, n-1)
		open(one, nap)
		free("with a block that waits", 1, n-1)
		for i := range n - 1 {
			open(slab.NewPrincipal("each"), sleep)
			free("with one of another", 1, n-2-i)
		}
		open(nil, nap) // nobody makes more room
		free("with no room left", 0, 0)
		late := blockOf(t, nil, byteModel(t, h, 1, true, nil), wide)
		time.Sleep(10 * blockTime)
		if s := late.Stats(); s.Blocks != 0 {
			t.Error("a block was computed without room")
		}
		close(held) // the nap ends
		takeAll(t, late)
		synctest.Wait()
		free("after the nap", 1, 0)
		close(hold)
		all.Wait()
		synctest.Wait()
		free("at the end", n, n)
		idle(t, h)
	})
}

func TestWhoIsPassedOverKeepsItsPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHost(HostConfig{Workers: 1})
		defer h.Close()
		var order []byte
		var all sync.WaitGroup
		open := func(who *slab.Principal, name byte, hold <-chan struct{}) {
			r := blockOf(t, who, byteModel(t, h, 1, true, func(context.Context, RowBlock) error {
				order = append(order, name)
				<-hold
				return nil
			}), wide)
			all.Go(func() { takeAll(t, r) })
			synctest.Wait()
		}
		sleeper := slab.NewPrincipal("sleeper")
		hold, held, none := make(chan struct{}), make(chan struct{}), make(chan struct{})
		close(none)
		open(sleeper, '1', hold)
		open(sleeper, '2', none)
		time.Sleep(blockTime) // the first is overlong, the second waits for it
		open(nil, 'a', held)
		open(nil, 'b', none)
		open(sleeper, '3', none)
		if got := string(order); got != "1a" {
			t.Errorf("begun are %s", got)
		}
		close(hold)
		synctest.Wait()
		close(held)
		all.Wait()
		if got := string(order); got != "1a2b3" {
			t.Errorf("the blocks began in the order %s", got)
		}
	})
}

func TestAClosedHostEndsWhatWaitsForAnOverlongBlock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHost(HostConfig{Workers: 1})
		sleeper, hold := slab.NewPrincipal("sleeper"), make(chan struct{})
		m := byteModel(t, h, 1, true, func(context.Context, RowBlock) error { <-hold; return nil })
		first, second, third := blockOf(t, sleeper, m, wide), blockOf(t, sleeper, m, wide), blockOf(t, sleeper, m, wide)
		time.Sleep(2 * blockTime)
		if err := third.Close(); err != nil { // one that waits ends with its run
			t.Error(err)
		}
		go h.Close()
		if _, err := second.Next(t.Context()); !errors.Is(err, engine.ErrClosed) {
			t.Errorf("Next returned %v, want ErrClosed", err)
		}
		if err := second.Close(); err != nil {
			t.Error(err)
		}
		close(hold)
		takeAll(t, first)
		idle(t, h)
	})
}

// timed is one block of the model: when it comes, how long it takes and, found out, when
// it began and ended. Times are since the beginning; never is -1.
type timed struct {
	run        int
	come, take time.Duration
	lag        time.Duration // how long it goes on when its run has ended; forever where it is never
	begun      time.Duration
	ended      time.Duration
}

// plan are the blocks of random runs.
type plan struct {
	workers int
	callers []int           // of each run; 0 is nobody
	cancels []time.Duration // of each run, or never
	blocks  []timed         // by run, each in order
}

const never = time.Duration(-1)

func randomPlan(rng *rand.Rand) (p plan) {
	between := func(a, b time.Duration) time.Duration { return a + time.Duration(rng.Int64N(int64(b-a))) }
	p.workers = 1 + rng.IntN(3)
	for run := range 2 + rng.IntN(9) {
		p.callers = append(p.callers, rng.IntN(4))
		p.cancels = append(p.cancels, never)
		if rng.IntN(3) == 0 {
			p.cancels[run] = between(0, 5*blockTime)
		}
		n := 1 + rng.IntN(5)
		var come []time.Duration
		for range n {
			come = append(come, between(0, 3*blockTime))
		}
		slices.Sort(come)
		for _, at := range come {
			b := timed{run: run, come: at, take: between(time.Microsecond, blockTime/20), lag: between(0, time.Millisecond), begun: never, ended: never}
			if rng.IntN(3) == 0 {
				b.lag = never
			}
			if rng.IntN(2) == 0 {
				b.take = between(blockTime*9/10, 4*blockTime)
			}
			p.blocks = append(p.blocks, b)
		}
	}
	return p
}

// simulate says when blocks begin and end, slowly: after each event it looks at all there is.
func (p plan) simulate() []timed {
	all := slices.Clone(p.blocks)
	caller := func(b *timed) int {
		if c := p.callers[b.run]; c > 0 {
			return -c
		}
		return b.run
	}
	var queue, running []*timed
	var turns []int // of callers whose blocks wait
	waits := func(c int) bool { return slices.ContainsFunc(queue, func(b *timed) bool { return caller(b) == c }) }
	for now := time.Duration(0); ; {
		overlong := make(map[int]bool)
		for _, b := range running {
			if now-b.begun >= blockTime {
				overlong[caller(b)] = true
			}
		}
		for free := p.workers + min(len(overlong), p.workers) - len(running); free > 0; free-- {
			at := slices.IndexFunc(turns, func(c int) bool { return !overlong[c] })
			if at < 0 {
				break
			}
			c := turns[at]
			turns = slices.Delete(turns, at, at+1)
			i := slices.IndexFunc(queue, func(b *timed) bool { return caller(b) == c })
			queue[i].begun = now
			running = append(running, queue[i])
			queue = slices.Delete(queue, i, i+1)
			if waits(c) {
				turns = append(turns, c)
			}
		}
		next := time.Duration(1<<63 - 1)
		at := func(when time.Duration) {
			if when > now {
				next = min(next, when)
			}
		}
		end := func(b *timed) time.Duration {
			if cancel := p.cancels[b.run]; cancel != never && b.lag != never {
				return min(b.begun+b.take, cancel+b.lag)
			}
			return b.begun + b.take
		}
		for i := range all {
			at(all[i].come)
		}
		for _, when := range p.cancels {
			at(when)
		}
		for _, b := range running {
			at(end(b))
			at(b.begun + blockTime)
		}
		if next == 1<<63-1 {
			return all
		}
		now = next
		gone := func(b *timed) bool { return p.cancels[b.run] != never && p.cancels[b.run] <= now }
		queue = slices.DeleteFunc(queue, gone)
		turns = slices.DeleteFunc(turns, func(c int) bool { return !waits(c) })
		for i := range all {
			if b := &all[i]; b.come == now && !gone(b) {
				if !waits(caller(b)) {
					turns = append(turns, caller(b))
				}
				queue = append(queue, b)
			}
		}
		running = slices.DeleteFunc(running, func(b *timed) bool {
			if end(b) == now {
				b.ended = now
			}
			return b.ended == now
		})
	}
}

// compute has a host compute a plan, and says when blocks began and ended.
func (p plan) compute(t *testing.T) (all []timed, most int) {
	h := NewHost(HostConfig{Workers: p.workers})
	begin := time.Now()
	all = slices.Clone(p.blocks)
	first := func(run int) int { return slices.IndexFunc(all, func(b timed) bool { return b.run == run }) }
	var mu sync.Mutex
	computing := 0
	m := byteModel(t, h, 1, true, func(ctx context.Context, rb RowBlock) error {
		run, err := strconv.Atoi(rb.Params["run"])
		if err != nil {
			return err
		}
		mu.Lock()
		b := &all[first(run)+int(rb.Row)]
		if b.begun != never {
			t.Error("a block was computed twice")
		}
		b.begun = time.Since(begin)
		computing++
		most = max(most, computing)
		mu.Unlock()
		over := time.NewTimer(b.take)
		defer over.Stop()
		if b.lag != never {
			defer context.AfterFunc(ctx, func() { over.Reset(min(b.lag, b.take-(time.Since(begin)-b.begun))) })()
		}
		<-over.C
		mu.Lock()
		defer mu.Unlock()
		computing--
		b.ended = time.Since(begin)
		return context.Cause(ctx)
	})
	who := []*slab.Principal{nil, slab.NewPrincipal("1"), slab.NewPrincipal("2"), slab.NewPrincipal("3")}
	var runs sync.WaitGroup
	for run, caller := range p.callers {
		blocks := slices.DeleteFunc(slices.Clone(p.blocks), func(b timed) bool { return b.run != run })
		d := tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{int64(len(blocks)), 8}}
		r, err := m.Open(t.Context(), engine.Call{
			Principal: who[caller], Params: map[string]string{"run": strconv.Itoa(run)},
			Inputs: []engine.Input{{Port: "x", Desc: d, ChunkBytes: 8}},
		})
		if err != nil {
			t.Fatal(err)
		}
		runs.Go(func() {
			for _, b := range blocks {
				lent, err := r.Borrow(t.Context())
				time.Sleep(b.come - time.Since(begin))
				if err != nil {
					return
				}
				r.Filled(lent)
			}
		})
		runs.Go(func() {
			for {
				o, err := r.Next(t.Context())
				if err != nil {
					break
				}
				o.Release()
			}
			if err := r.Close(); err != nil && !errors.Is(err, engine.ErrClosed) {
				t.Error(err)
			}
		})
		if at := p.cancels[run]; at != never {
			runs.Go(func() {
				time.Sleep(at)
				if err := r.Close(); err != nil && !errors.Is(err, engine.ErrClosed) {
					t.Error(err)
				}
			})
		}
	}
	runs.Wait()
	synctest.Wait()
	if room, more := h.workers.room(); room != p.workers || more != p.workers {
		t.Errorf("there is room for %d blocks and %d more", room, more)
	}
	idle(t, h)
	h.Close()
	return all, most
}

func TestBlocksAreComputedAsInTheModel(t *testing.T) {
	rng := testkit.Rand(t)
	rounds := 300
	if testing.Short() {
		rounds = 30
	}
	long, waited := 0, 0
	for range rounds {
		p := randomPlan(rng)
		synctest.Test(t, func(t *testing.T) {
			want := p.simulate()
			got, most := p.compute(t)
			if most > 2*p.workers {
				t.Errorf("%d blocks were computed at a time with %d workers", most, p.workers)
			}
			for i := range want {
				if got[i] != want[i] {
					t.Fatalf("of %d workers and callers %v, block %d of %v: got %+v, want %+v", p.workers, p.callers, i, p.cancels, got[i], want[i])
				}
				if got[i].ended-got[i].begun > blockTime {
					long++
				}
				if got[i].begun > got[i].come {
					waited++
				}
			}
		})
	}
	t.Logf("%d blocks were overlong, %d waited", long, waited)
	if long == 0 || waited == 0 {
		t.Error("the plans are too easy")
	}
}
