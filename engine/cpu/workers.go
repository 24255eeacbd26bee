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

// workers are the device of a host. Callers take turns: the next block to compute is the first one of
// the next caller's, and a worker computes it, or whoever waits for its result.
//
// There is room for as many blocks at a time as there are workers. One that takes longer than blockTime is
// overlong: the other blocks of its caller wait until it ends, and there is room for one more, so that
// those of others are computed.
//
// A block of a stack model rests between rows. One that has been computed for turnTime is long: it takes
// no room any more, and takes turns with other long ones. As long as blocks of others come, these leave a
// core to them: who waits for the network does so on a core that is idle.
type workers struct {
	n    int            // workers
	all  sync.WaitGroup // and the naps of slow
	over chan struct{}  // closed with closed

	mu       sync.Mutex // guards all below
	more     sync.Cond  // a block can be computed, or closed
	callers  map[any]*caller
	unused   []*caller
	waiting  []*caller // that have a block which waits, in the order of their turns
	free     []*seat
	begun    int       // blocks that take room
	overlong int       // callers that have an overlong block
	long     int       // blocks
	unpaid   int       // of these, those whose tile no call is charged for
	resting  []*seat   // of these, the next to go on first
	brief    time.Time // when a block began that was not long, beside long ones of others
	closed   bool
}

// caller is whom blocks are computed for: a principal or, where a run has none, that run.
type caller struct {
	key                   any
	queue                 blocks.Queue
	begun, overlong, long int // of its blocks that are computed
}

// seat is what a block has that is computed. It is used again.
type seat struct {
	workers  *workers
	caller   *caller
	work     *blocks.Work
	clock    *time.Timer // for the time when it is overlong: as it rings, not when a block begins, it is set again
	ticking  bool        // clock does
	begin    time.Time
	since    time.Time // when it was computed without a rest
	helped   bool      // by whoever waits for the result
	overlong bool
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
	p := &workers{n: n, over: make(chan struct{}), callers: make(map[any]*caller)}
	p.more.L = &p.mu
	for range 2 * n { // with as many overlong blocks
		p.all.Go(p.work)
	}
	return p
}

// close ends the blocks that wait, and returns when the others have ended.
func (p *workers) close() {
	var over blocks.Queue
	p.mu.Lock()
	p.closed = true
	close(p.over)
	for _, c := range p.waiting {
		over.Append(&c.queue)
	}
	p.waiting = nil
	p.more.Broadcast()
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
	var key any = w.Context()
	if who := w.Principal(); who != nil {
		key = who
	}
	c := p.callers[key]
	if c == nil {
		if len(p.unused) == 0 {
			p.unused = append(p.unused, new(caller))
		}
		c, p.unused = p.unused[len(p.unused)-1], p.unused[:len(p.unused)-1]
		c.key, p.callers[key] = key, c
	}
	if c.queue.Push(w); c.queue.Len() == 1 {
		p.waiting = append(p.waiting, c)
	}
	if p.next() != c || c.queue.Head() != w || !w.Offer() {
		p.wake()
	}
}

// Cancel implements blocks.Canceler.
func (p *workers) Cancel(run context.Context) {
	var over blocks.Queue
	p.mu.Lock()
	p.waiting = slices.DeleteFunc(p.waiting, func(c *caller) bool {
		c.queue.Take(run, &over)
		p.forget(c)
		return c.queue.Len() == 0
	})
	p.mu.Unlock()
	over.End(nil)
}

// forget ends a caller without blocks; mu is held.
func (p *workers) forget(c *caller) {
	if c.queue.Len() == 0 && c.begun == 0 {
		delete(p.callers, c.key)
		p.unused = append(p.unused, c)
	}
}

// work is a worker: it computes the blocks of every caller.
func (p *workers) work() {
	for {
		p.mu.Lock()
		for !p.closed && p.next() == nil {
			p.more.Wait()
		}
		if p.closed {
			p.mu.Unlock()
			return
		}
		s := p.take(p.next())
		p.mu.Unlock()
		if p.compute(s) {
			return // another has taken its place
		}
	}
}

// Help implements blocks.Helper.
func (p *workers) Help(w *blocks.Work) bool {
	p.mu.Lock()
	c := p.next()
	if c == nil || c.queue.Head() != w {
		p.mu.Unlock()
		return false
	}
	s := p.take(c)
	s.helped = true
	p.mu.Unlock()
	p.compute(s)
	return true
}

// Compute implements blocks.Helper.
func (p *workers) Compute(program any, b blocks.RowBlock) bool {
	p.mu.Lock()
	free := !p.closed && len(p.waiting) == 0 && p.begun < p.n
	if free {
		p.begun++
	}
	p.mu.Unlock()
	if !free {
		return false
	}
	err := program.(RowsFunc)(context.Background(), b)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.begun--
	p.wake()
	return err == nil
}

// next returns the caller whose turn it is, nil where there is no room or nobody waits. One that has an
// overlong block, or a long one and as many in all as there are workers, keeps its place; mu is held.
func (p *workers) next() *caller {
	if p.begun >= p.n+min(p.overlong, p.n) {
		return nil
	}
	for _, c := range p.waiting {
		if c.overlong == 0 && (c.long == 0 || c.begun < p.n) {
			return c
		}
	}
	return nil
}

// wake wakes a worker if there is something for it; mu is held.
func (p *workers) wake() {
	if p.next() != nil {
		p.more.Signal()
	}
}

// take begins the first block of c, whose turn it is; mu is held. It wakes another worker: one block may
// have made room for several, and the wake-up of the next may have gone to this one.
func (p *workers) take(c *caller) *seat {
	at := slices.Index(p.waiting, c)
	p.waiting = slices.Delete(p.waiting, at, at+1)
	w, now := c.queue.Pop(), time.Now()
	if c.queue.Len() > 0 {
		p.waiting = append(p.waiting, c)
	}
	if len(p.free) == 0 {
		s := &seat{ticking: true}
		s.clock = time.AfterFunc(blockTime, func() { p.late(s) })
		p.free = append(p.free, s)
	}
	s := p.free[len(p.free)-1]
	p.free = p.free[:len(p.free)-1]
	if !s.ticking {
		s.clock.Reset(blockTime)
	}
	*s = seat{workers: p, caller: c, work: w, clock: s.clock, ticking: true, begin: now, since: now}
	c.begun++
	p.begun++
	p.wake()
	return s
}

// late notes that a block has become overlong. The seat may have another by now, or none.
func (p *workers) late(s *seat) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s.ticking = false; s.work == nil || s.turn != nil {
		return
	}
	if left := blockTime - time.Since(s.begin); left > 0 {
		s.ticking = true
		s.clock.Reset(left)
		return
	}
	s.overlong = true
	if s.caller.overlong++; s.caller.overlong == 1 {
		p.overlong++
		p.wake()
	}
}

// compute runs a model's own code on a block, and reports whether it was long.
func (p *workers) compute(s *seat) (long bool) {
	err := context.Cause(s.work.Context())
	if err == nil {
		watched()
		err = call(s)
	}
	s.work.Done(err, blocks.Times{Compute: time.Since(s.begin)})
	p.mu.Lock()
	defer p.mu.Unlock()
	c := s.caller
	if long = s.turn != nil; long {
		p.count(s, -1)
		p.turns()
	} else if p.leave(s); p.long > 0 && c.long == 0 {
		p.brief = s.begin
	}
	c.begun--
	p.forget(c)
	s.work = nil
	p.free = append(p.free, s)
	p.wake()
	return long
}

// leave gives up the room of a block that has ended, or has become long; mu is held.
func (p *workers) leave(s *seat) {
	p.begun--
	if s.overlong {
		s.overlong = false
		if s.caller.overlong--; s.caller.overlong == 0 {
			p.overlong--
		}
	}
}

// count counts a long block, by 1 or -1; mu is held.
func (p *workers) count(s *seat, by int) {
	p.long += by
	s.caller.long += by
	if !s.charged {
		p.unpaid += by
	}
}

// restingRows is a RowsFunc that calls rest.
type restingRows RowsFunc

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
		if !charged && p.unpaid >= p.n*longPerWorker {
			s.since = time.Now()
			p.mu.Unlock()
			return
		}
		p.leave(s)
		s.turn, s.charged = make(chan struct{}, 1), charged
		if p.count(s, 1); !s.helped {
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
	if time.Since(p.brief) < blockTime { // whoever makes a call a second finds a core idle
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
