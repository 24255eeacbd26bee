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
//
// A block of a stack model rests between rows. One that has been computed for turnTime is long: it
// gives its permit back, and takes turns with other long ones. As long as blocks of others come,
// these leave a core to them: who waits for the network does so on a core that is idle.
type workers struct {
	n    int            // workers
	all  sync.WaitGroup // and the naps of slow
	over chan struct{}  // closed with closed

	mu       sync.Mutex // guards all below
	more     sync.Cond  // a block can be computed, or closed
	queue    blocks.Queue
	aside    blocks.Queue // blocks ahead of the queue, set aside while a block of their caller was overlong
	busy     []*seat      // of blocks that are computed, and long ones that rest
	resting  []*seat      // of these, the next to go on first
	free     []*seat
	permits  int // that may be taken
	spares   int // that replace those of overlong blocks
	overlong int // blocks
	long     int
	brief    time.Time // when a block began that was not long, beside long ones of others
	clock    *time.Timer
	ticking  bool // clock runs
	closed   bool
}

// seat is what a block has that is computed, with a permit or, if it is long, in turns. It is used
// again.
type seat struct {
	workers  *workers
	work     *blocks.Work
	begin    time.Time
	since    time.Time // when it was computed without a rest
	helped   bool      // by whoever waits for the result
	overlong bool
	replaced bool          // by a spare: its permit is one itself when the block ends
	turn     chan struct{} // has one when a long block is to go on; nil where it is none
	charged  bool          // a long one's tile, to its call
}

// seated is the context of a block whose model rests. A model of somebody else's may keep its
// context, and gets the run's.
type seated struct {
	context.Context
	seat *seat
}

type seatKey struct{}

func (c seated) Value(key any) any {
	if key == (seatKey{}) {
		return c.seat
	}
	return c.Context.Value(key)
}

// newWorkers returns n workers, which end with close.
func newWorkers(n int) *workers {
	p := &workers{n: n, over: make(chan struct{}), permits: n, spares: n * sparesPerWorker}
	p.more.L = &p.mu
	p.clock = time.AfterFunc(blockTime, p.tick)
	p.clock.Stop()
	for range n + n*sparesPerWorker {
		p.all.Go(p.work)
	}
	return p
}

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
		s := p.take()
		p.mu.Unlock()
		if p.compute(s) {
			return // another has taken its place
		}
	}
}

// Help implements blocks.Helper, if a permit is free.
func (p *workers) Help(w *blocks.Work) bool {
	p.mu.Lock()
	if p.closed || p.permits == 0 || p.head() != w {
		p.mu.Unlock()
		return false
	}
	s := p.take()
	s.helped = true
	p.mu.Unlock()
	p.compute(s)
	return true
}

// head returns the first block that may be computed, nil without one, and puts those
// before it aside, whose callers have an overlong block, or a long one and as many in all as
// there are workers; mu is held.
func (p *workers) head() *blocks.Work {
	for {
		w := p.queue.Head()
		if w == nil || p.overlong+p.long == 0 {
			return w
		}
		overlong, long, all := false, false, 0
		for _, s := range p.busy {
			if sameCaller(s.work, w) {
				overlong, long, all = overlong || s.overlong, long || s.turn != nil, all+1
			}
		}
		if !overlong && (!long || all < p.n) {
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
func (p *workers) take() *seat {
	w, now := p.queue.Pop(), time.Now()
	if len(p.free) == 0 {
		p.free = append(p.free, new(seat))
	}
	s := p.free[len(p.free)-1]
	p.free = p.free[:len(p.free)-1]
	*s = seat{workers: p, work: w, begin: now, since: now}
	p.busy = append(p.busy, s)
	p.permits--
	if !p.ticking {
		p.ticking = true
		p.clock.Reset(blockTime)
	}
	p.wake()
	return s
}

// tick finds blocks that have become overlong. It runs when one may have: about once in
// blockTime, however many blocks there are.
func (p *workers) tick() {
	p.mu.Lock()
	defer p.mu.Unlock()
	now, next := time.Now(), time.Duration(0)
	for _, s := range p.busy {
		if s.turn != nil || s.overlong {
			continue
		}
		switch left := blockTime - now.Sub(s.begin); {
		case left <= 0:
			s.overlong = true
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
	for _, s := range p.busy {
		if p.spares == 0 {
			return
		}
		if s.overlong && !slices.ContainsFunc(p.busy, func(o *seat) bool { return o.replaced && sameCaller(o.work, s.work) }) {
			s.replaced = true
			p.spares--
			p.permits++
		}
	}
}

// compute runs a model's own code on a block, and reports whether it was long.
func (p *workers) compute(s *seat) (long bool) {
	err := context.Cause(s.work.Context())
	if err == nil {
		err = call(s)
	}
	s.work.Done(err, blocks.Times{Compute: time.Since(s.begin)})
	p.mu.Lock()
	defer p.mu.Unlock()
	p.busy = slices.DeleteFunc(p.busy, func(o *seat) bool { return o == s })
	if s.turn == nil {
		p.leave(s)
		if p.long > 0 && !slices.ContainsFunc(p.busy, func(o *seat) bool { return o.turn != nil && sameCaller(o.work, s.work) }) {
			p.brief = s.begin
		}
	} else {
		p.long--
		p.turns()
	}
	if long = s.turn != nil; long || p.long > 0 {
		p.again()
	}
	p.free = append(p.free, s)
	p.wake()
	return long
}

// leave gives a permit back; mu is held.
func (p *workers) leave(s *seat) {
	if s.replaced {
		p.spares++
	} else {
		p.permits++
	}
	if s.overlong {
		s.overlong, s.replaced = false, false
		p.overlong--
		p.again()
		p.replace()
	}
}

// again puts what was set aside first again; mu is held.
func (p *workers) again() {
	if p.aside.Len() > 0 {
		p.aside.Append(&p.queue)
		p.queue, p.aside = p.aside, blocks.Queue{}
	}
}

// restingRows is a RowsFunc that calls rest.
type restingRows RowsFunc

func rowsOf(program any) RowsFunc {
	if f, ok := program.(restingRows); ok {
		return RowsFunc(f)
	}
	return program.(RowsFunc)
}

// rest lets others be computed, where a block has been for turnTime, and reports whether its run
// has ended. What works long calls it between rows, and says whether its tile is charged to the call.
func rest(ctx context.Context, charged bool) (ended bool) {
	if s, ok := ctx.Value(seatKey{}).(*seat); ok && time.Since(s.since) >= turnTime && ctx.Err() == nil {
		s.rest(charged, ctx.Done())
	}
	return ctx.Err() != nil
}

func (s *seat) rest(charged bool, ended <-chan struct{}) {
	p := s.workers
	p.mu.Lock()
	if s.turn == nil {
		left := p.n * longPerWorker
		for _, o := range p.busy {
			if o.turn != nil && !o.charged {
				left--
			}
		}
		if !charged && left <= 0 {
			s.since = time.Now()
			p.mu.Unlock()
			return
		}
		p.leave(s)
		s.turn, s.charged = make(chan struct{}, 1), charged
		if p.long++; !s.helped {
			p.all.Go(p.work) // in place of this one
		}
		p.wake()
	}
	p.resting = append(p.resting, s)
	p.turns()
	p.mu.Unlock()
	select {
	case <-s.turn:
	case <-ended:
		p.mu.Lock()
		p.resting = slices.DeleteFunc(p.resting, func(o *seat) bool { return o == s })
		p.mu.Unlock()
	}
	s.since = time.Now()
}

// turns lets long blocks go on, first come, first served; mu is held.
func (p *workers) turns() {
	most := p.n
	if time.Since(p.brief) < quietTime {
		most = max(1, most-1)
	}
	for len(p.resting) > 0 && p.long-len(p.resting) < most {
		p.resting[0].turn <- struct{}{}
		p.resting = slices.Delete(p.resting, 0, 1)
	}
}

func call(s *seat) (err error) {
	w := s.work
	defer engine.Recovered(w.Model(), &err)
	if f, ok := w.Program.(RowsFunc); ok {
		return f(w.Context(), w.RowBlock)
	}
	ctx := seated{w.Context(), s}
	if f, ok := w.Program.(restingRows); ok {
		return f(ctx, w.RowBlock)
	}
	in := make([]tensor.Tensor, len(w.In))
	for i, data := range w.In {
		if data == nil {
			data = w.Whole[i]
		}
		in[i] = tensor.Tensor{Desc: w.Descs[i], Data: data}
	}
	out, err := w.Program.(wholeFunc)(ctx, in)
	if err == nil {
		w.Give(out, nil)
	}
	return err
}
