package cpu

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/blocks"
	"github.com/tensorferry/tensorferry/tensor"
)

// workers are the device of a host. Blocks of all runs wait in one first-come queue; a run
// has no more of them in it than it has slots, so none can push the others out.
//
// A block is computed with a permit, by a worker or by whoever waits for its result.
// One that takes longer than blockTime is overlong: a spare replaces its permit, so that the
// blocks of others are computed, and those of its caller wait until it ends.
type workers struct {
	all  sync.WaitGroup // and the naps of slow
	over chan struct{}  // closed with closed

	mu       sync.Mutex // guards all below
	more     sync.Cond  // a block can be computed, or closed
	queue    blocks.Queue
	aside    blocks.Queue // blocks ahead of the queue, set aside while a block of their caller was overlong
	every    []permit
	free     []*permit
	permits  int // of the free ones that may be taken
	spares   int // of the others, which replace those of overlong blocks
	overlong int // blocks
	clock    *time.Timer
	ticking  bool // clock runs
	closed   bool
}

// permit allows one block to be computed.
type permit struct {
	work     *blocks.Work // that is being computed, nil when the permit is free
	begin    time.Time
	overlong bool
	replaced bool // by a spare: it is one itself when the block ends
}

// newWorkers returns n workers, which end with close.
func newWorkers(n int) *workers {
	p := &workers{over: make(chan struct{}), every: make([]permit, n+n*sparesPerWorker), permits: n, spares: n * sparesPerWorker}
	p.more.L = &p.mu
	p.clock = time.AfterFunc(blockTime, p.tick)
	p.clock.Stop()
	for i := range p.every {
		p.free = append(p.free, &p.every[i])
		p.all.Go(p.work)
	}
	return p
}

// number returns how many workers there are.
func (p *workers) number() int { return len(p.every) / (1 + sparesPerWorker) }

// close ends the blocks that wait, and returns when the others have ended.
func (p *workers) close() {
	p.mu.Lock()
	p.closed = true
	close(p.over)
	p.clock.Stop()
	p.more.Broadcast()
	over := p.aside
	over.Append(&p.queue)
	p.aside = blocks.Queue{}
	p.mu.Unlock()
	over.End(engine.ErrClosed)
	p.all.Wait()
}

// Start implements blocks.Device. It wakes no worker where the taker of the result helps.
func (p *workers) Start(w *blocks.Work) {
	p.mu.Lock()
	if p.closed || w.Context().Err() != nil {
		p.mu.Unlock()
		w.End(engine.ErrClosed)
		return
	}
	defer p.mu.Unlock()
	if n, ok := w.Program.(nap); ok {
		p.all.Go(func() { n.pass(w, p.over) })
		return
	}
	p.queue.Push(w)
	if p.head() != w || !w.Offer() {
		p.wake()
	}
}

// Cancel implements blocks.Canceler.
func (p *workers) Cancel(run context.Context) {
	p.mu.Lock()
	over, rest := p.aside.Take(run), p.queue.Take(run)
	p.mu.Unlock()
	over.Append(&rest)
	over.End(nil)
}

// work is a worker: it computes the blocks of every run.
func (p *workers) work() {
	for {
		p.mu.Lock()
		for !p.closed && (p.permits == 0 || p.head() == nil) {
			p.more.Wait()
		}
		if p.closed {
			p.mu.Unlock()
			return
		}
		t := p.take()
		p.mu.Unlock()
		p.compute(t)
	}
}

// Help implements blocks.Helper, if a permit is free.
func (p *workers) Help(w *blocks.Work) bool {
	p.mu.Lock()
	if p.closed || p.permits == 0 || p.head() != w {
		p.mu.Unlock()
		return false
	}
	t := p.take()
	p.mu.Unlock()
	p.compute(t)
	return true
}

// head returns the first block that may be computed, nil without one, and puts those
// before it aside, whose callers have an overlong block; mu is held.
func (p *workers) head() *blocks.Work {
	for {
		w := p.queue.Head()
		if w == nil || p.overlong == 0 || !slices.ContainsFunc(p.every, func(t permit) bool { return t.overlong && sameCaller(t.work, w) }) {
			return w
		}
		p.aside.Push(p.queue.Pop())
	}
}

// sameCaller reports whether two blocks are of one run, or of runs of one principal:
// those that have none have nothing to do with each other.
func sameCaller(a, b *blocks.Work) bool {
	who := a.Principal()
	return a.Context() == b.Context() || who != nil && who == b.Principal()
}

// wake wakes a worker if there is something for it; mu is held.
func (p *workers) wake() {
	if p.permits > 0 && p.head() != nil {
		p.more.Signal()
	}
}

// take takes a permit for the first block; mu is held. The next block may have been
// queued behind one that woke no worker: its own wake-up then went to the first.
func (p *workers) take() *permit {
	last := len(p.free) - 1
	t := p.free[last]
	p.free = p.free[:last]
	p.permits--
	t.work, t.begin = p.queue.Pop(), time.Now()
	if !p.ticking {
		p.ticking = true
		p.clock.Reset(blockTime)
	}
	p.wake()
	return t
}

// tick finds blocks that have become overlong. It runs when one may have: about once in
// blockTime, however many blocks there are.
func (p *workers) tick() {
	p.mu.Lock()
	defer p.mu.Unlock()
	now, next := time.Now(), time.Duration(0)
	for i := range p.every {
		t := &p.every[i]
		if t.work == nil || t.overlong {
			continue
		}
		switch left := blockTime - now.Sub(t.begin); {
		case left <= 0:
			t.overlong = true
			p.overlong++
		case next == 0 || left < next:
			next = left
		}
	}
	if p.ticking = next > 0 && !p.closed; p.ticking {
		p.clock.Reset(next)
	}
	p.replace()
	p.wake()
}

// replace replaces permits of overlong blocks, one of each caller, by spares; mu is held.
func (p *workers) replace() {
	for i := range p.every {
		t := &p.every[i]
		if p.spares == 0 {
			return
		}
		if t.overlong && !slices.ContainsFunc(p.every, func(o permit) bool { return o.replaced && sameCaller(o.work, t.work) }) {
			t.replaced = true
			p.spares--
			p.permits++
		}
	}
}

// compute runs a model's own code on the block of a permit, and gives that back.
func (p *workers) compute(t *permit) {
	w := t.work
	err := context.Cause(w.Context())
	if err == nil {
		err = call(w)
	}
	w.Done(err, blocks.Times{Compute: time.Since(t.begin)})
	p.leave(t)
}

// leave gives a permit back. What has waited for the end of an overlong block is first again.
func (p *workers) leave(t *permit) {
	p.mu.Lock()
	defer p.mu.Unlock()
	was := *t
	*t = permit{}
	p.free = append(p.free, t)
	if was.replaced {
		p.spares++
	} else {
		p.permits++
	}
	if was.overlong {
		p.overlong--
		p.aside.Append(&p.queue)
		p.queue, p.aside = p.aside, blocks.Queue{}
		p.replace()
	}
	p.wake()
}

func call(w *blocks.Work) (err error) {
	defer engine.Recovered(w.Model(), &err)
	if f, ok := w.Program.(RowsFunc); ok {
		return f(w.Context(), w.RowBlock)
	}
	in := make([]tensor.Tensor, len(w.In))
	for i, data := range w.In {
		if data == nil {
			data = w.Whole[i]
		}
		in[i] = tensor.Tensor{Desc: w.Descs[i], Data: data}
	}
	out, err := w.Program.(wholeFunc)(w.Context(), in)
	if err == nil {
		w.Give(out, nil)
	}
	return err
}
