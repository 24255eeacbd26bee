package blocks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// run is one call in progress. Blocks wait in three places: free slots wait for
// Borrow, pending ones (filled) for result memory, the others at the device. Slots,
// works and their closures are made once: a block allocates nothing.
//
// Where results do not share the memory of the input, a block starts only inside a
// window: below the oldest block with unreleased results plus the number of result
// slots. So the results that one chunk spans always get memory, however far the input
// has come ahead of a block that is still missing, and a run of which nobody takes the
// results does not fill the memory of a device that gives them.
type run struct {
	engine *Engine
	holder *slab.Principal
	info   engine.Info
	job    RowBlock // of which each block's is made
	plan   plan     // its outRow and what follows from it belong to mu
	bound  Bound
	ctx    context.Context
	cancel context.CancelCauseFunc

	// One token each: something changed for the one who waits.
	lendable, nextable, idle chan struct{}

	slots []*slot
	works []*Work
	whole *slot // the block of Whole inputs, nil without any
	// help is the only block of a small call, which Next has computed on its own
	// goroutine; nil where the device does not do that.
	help *Work
	// sourced: the model has no inputs, its slots are filled as they come free.
	sourced  bool
	stateful bool // a call with a State, which goes with the device

	mu        sync.Mutex
	outs      []tensor.Desc
	granted   int64 // bytes of the budget
	inSlots   int64 // slots that are the run's
	window    int64 // blocks that may have results
	closed    bool
	over      bool // Close has waited long enough
	launching bool // somebody is starting blocks
	stats     engine.Stats
	free      []*slot // the last one is lent next: its memory is the warmest
	lent      int64   // blocks lent so far
	pending   []*slot // descending by index: the lowest is the last
	active    int     // blocks at the device
	freeOut   []*Work
	low       int64         // the oldest block with unreleased results
	done      []bool        // results released, by index modulo the length: no window is longer
	results   Queue         // to be given out: done blocks
	yielded   int64         // results given out by Next
	unclaimed int           // of those, not yet released
	stopped   chan struct{} // closed when no block is at the device; nil unless Close gave up
}

type slotState uint8

const (
	slotFree slotState = iota
	slotLent
	slotFilled
	slotActive // at the device
	slotShared // done; results lie in it
)

// slot is the memory of one block of input.
type slot struct {
	run   *run
	index int64
	state slotState
	block engine.Block
	slab  *slab.Slab // nil until first needed
	work  *Work      // whose results share the slot, and are done
}

// start takes the memory of a run, the minimum all or nothing, and lays out its slots.
func (m *model) start(ctx context.Context, c engine.Call, p plan, b Bound) (engine.Run, error) {
	begin := time.Now()
	e, info, least := m.engine, m.Model.Info.Of(c.Inputs), p.least()
	if err := e.cfg.Budget.Acquire(ctx, c.Principal, least); err != nil {
		return nil, fmt.Errorf("engine: model %q: memory for the call: %w", info.Name, err)
	}
	r := &run{
		engine: e, holder: c.Principal, info: info, plan: p, bound: b, outs: b.Outs, granted: least,
		sourced: len(info.Inputs) == 0, stateful: c.State != nil, free: make([]*slot, 0, p.wantIn),
		lendable: make(chan struct{}, 1), nextable: make(chan struct{}, 1), idle: make(chan struct{}, 1),
	}
	r.stats.Queue = time.Since(begin)
	r.done = make([]bool, min(p.blocks+1, maxSlots)) // one is false when all blocks are done

	r.job = RowBlock{Descs: c.Descs(), OutDescs: b.Outs, Params: c.Params}
	if slices.ContainsFunc(info.Inputs, func(p engine.Port) bool { return p.Whole }) {
		r.whole = r.newSlot()
		r.whole.block.Whole = true
		r.job.Whole = r.whole.block.In
	}
	out := p.minOut
	switch b.Results {
	case Given: // its memory is the device's
		out = p.wantOut
	case InPlace: // the slots bound it
		out, r.window = 0, maxSlots
	}
	for range p.minIn {
		r.addSlot()
	}
	for range out {
		r.addOut()
	}
	r.grow(p.wantIn, p.wantOut)
	if _, helps := e.cfg.Device.(Helper); helps && p.blocks == 1 && p.inBlock <= engine.AtOnceBytes {
		r.help = r.works[0]
	}
	r.pending = make([]*slot, 0, r.inSlots)
	r.ctx, r.cancel = context.WithCancelCause(ctx)
	if err := e.enter(r); err != nil {
		r.fail(err)
		r.giveUp(r.granted)
		return nil, context.Cause(r.ctx)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.launch()
	return r, nil
}

func (r *run) newSlot() *slot {
	s := &slot{run: r, block: engine.Block{In: make([][]byte, len(r.info.Inputs))}}
	s.block.Slot = s
	return s
}

// addSlot adds a slot, and what its results need if they are there. The others are lent before it: their
// memory is warmer.
func (r *run) addSlot() {
	s := r.newSlot()
	r.slots = append(r.slots, s)
	r.free = slices.Insert(r.free, 0, s)
	r.inSlots++
	if r.bound.Results == InPlace {
		r.freeOut = append(r.freeOut, r.newWork())
	}
}

// addOut lets another block have results.
func (r *run) addOut() {
	r.window++
	r.freeOut = append(r.freeOut, r.newWork())
}

// grow has up to so many slots and blocks with results of their own, as far as there is memory: in turns,
// since those of one direction alone speed nothing up.
func (r *run) grow(in, out int64) {
	take := func(have, most, block int64) bool {
		ok := have < most && r.engine.cfg.Budget.TryAcquire(r.holder, block)
		if ok {
			r.granted += block
		}
		return ok
	}
	for more := true; more; {
		more = false
		if take(r.inSlots, in, r.plan.inBlock) {
			r.addSlot()
			more = true
		}
		if r.bound.Results == Own && take(r.window, out, r.plan.outBlock) {
			r.addOut()
			more = true
		}
	}
}

func (r *run) newWork() *Work {
	n := len(r.info.Outputs)
	w := &Work{RowBlock: r.job, Program: r.bound.Program, run: r, release: make([]func(), n), held: make([]bool, n)}
	w.Out = make([][]byte, n)
	for port := range n {
		w.release[port] = func() { w.released(port) }
	}
	r.works = append(r.works, w)
	return w
}

// fail ends the run, unless it has ended: the first cause stands.
func (r *run) fail(err error) {
	if r.stateful && (errors.Is(err, engine.ErrUnavailable) || errors.Is(err, engine.ErrClosed)) {
		err = fmt.Errorf("%w: %w", engine.ErrStateLost, err)
	}
	r.cancel(err)
}

// Borrow implements engine.Run.
func (r *run) Borrow(ctx context.Context) (*engine.Block, error) {
	for {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if b, err := r.borrow(); b != nil || err != nil {
			return b, err
		}
		select {
		case <-r.lendable:
		case <-ctx.Done():
		case <-r.ctx.Done():
		}
	}
}

func (r *run) borrow() (_ *engine.Block, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.closed:
		return nil, engine.ErrClosed
	case r.lent == r.plan.blocks, r.sourced:
		return nil, io.EOF
	case r.ctx.Err() != nil:
		return nil, context.Cause(r.ctx)
	}
	s, bytes, widths, rows := r.whole, r.plan.wholeBytes, r.plan.whole, int64(1)
	if s == nil || s.state != slotFree {
		if s = r.next(); s == nil {
			return nil, nil
		}
		bytes, widths, rows = r.plan.inBlock, r.plan.inRow, s.block.Rows
	}
	s.state = slotLent
	if s.slab == nil {
		if s.slab, err = r.take(bytes); err != nil {
			return nil, err
		}
	}
	carve(bytesOf(s.slab), s.block.In, widths, rows)
	return &s.block, nil
}

// next takes a free slot for the next block, nil if there is none; mu is held.
func (r *run) next() *slot {
	if len(r.free) == 0 || r.lent == r.plan.blocks {
		return nil
	}
	s := r.free[len(r.free)-1]
	r.free = r.free[:len(r.free)-1]
	s.index = r.lent
	s.block.Row, s.block.Rows = r.plan.span(s.index)
	r.lent++
	return s
}

// put makes a slot free; mu is held.
func (r *run) put(s *slot) {
	s.state = slotFree
	r.free = append(r.free, s)
	wake(r.lendable)
}

// Filled implements engine.Run.
func (r *run) Filled(b *engine.Block) {
	s := b.Slot.(*slot)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return // the memory went back with Close
	}
	if s.run != r || s.state != slotLent {
		panic("engine: Filled with a block that is not lent")
	}
	r.filled(s)
	r.launch()
}

// filled notes a block that is to be computed; mu is held.
func (r *run) filled(s *slot) {
	s.state = slotFilled
	if s == r.whole {
		return
	}
	at := len(r.pending)
	for at > 0 && r.pending[at-1].index < s.index {
		at--
	}
	r.pending = slices.Insert(r.pending, at, s)
}

// launch starts every block that may start, ascending. The caller holds mu, which
// it gives away while the device is called: what becomes ready meanwhile is left to
// whoever is here already, so that Done within Start does not nest.
func (r *run) launch() {
	if r.launching {
		return
	}
	r.launching = true
	for w := r.ready(); w != nil; w = r.ready() {
		r.mu.Unlock()
		r.engine.cfg.Device.Start(w)
		r.mu.Lock()
	}
	r.launching = false
}

// ready makes the next block that may start ready, nil if there is none; mu is held.
func (r *run) ready() *Work {
	for {
		if r.closed || r.ctx.Err() != nil || r.whole != nil && r.whole.state != slotFilled {
			return nil
		}
		if r.sourced {
			for s := r.next(); s != nil; s = r.next() {
				r.filled(s)
			}
		}
		if len(r.pending) == 0 {
			return nil
		}
		s := r.pending[len(r.pending)-1]
		if s.index >= r.low+r.window {
			return nil
		}
		// Inside the window fewer blocks have results than there are slots.
		w := r.freeOut[len(r.freeOut)-1]
		switch r.bound.Results {
		case Own:
			if w.slab == nil {
				var err error
				if w.slab, err = r.take(r.plan.outBlock); err != nil {
					return nil
				}
			}
			carve(bytesOf(w.slab), w.Out, r.plan.outRow, s.block.Rows)
		case InPlace:
			split := slices.IndexFunc(s.block.In, func(data []byte) bool { return data != nil })
			w.Out[0], w.shared = s.block.In[split], true
		case Given:
			w.bad = errNotGiven
		}
		r.freeOut = r.freeOut[:len(r.freeOut)-1]
		r.pending = r.pending[:len(r.pending)-1]
		w.index, w.slot, w.In = s.index, s, s.block.In
		w.Row, w.Rows = s.block.Row, s.block.Rows
		s.state, w.state = slotActive, workStarted
		r.active++
		if w.Rows > 0 || r.bound.Results == Given {
			return w
		}
		r.finish(w, nil, Times{})
	}
}

// Next implements engine.Run.
func (r *run) Next(ctx context.Context) (engine.Out, error) {
	for {
		if ctx.Err() != nil {
			return engine.Out{}, context.Cause(ctx)
		}
		if o, ok, err := r.pop(); ok || err != nil {
			return o, err
		}
		if r.help != nil && r.engine.cfg.Device.(Helper).Help(r.help) {
			continue
		}
		select {
		case <-r.nextable:
		case <-ctx.Done():
		case <-r.ctx.Done():
		}
	}
}

func (r *run) pop() (engine.Out, bool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.closed:
		return engine.Out{}, false, engine.ErrClosed
	case r.yielded == r.plan.blocks*int64(len(r.info.Outputs)):
		return engine.Out{}, false, io.EOF
	case r.ctx.Err() != nil:
		return engine.Out{}, false, context.Cause(r.ctx)
	case r.results.Head() == nil:
		return engine.Out{}, false, nil
	}
	w := r.results.Head()
	if r.engine.cfg.Spill != nil && r.engine.cfg.Budget.Waited() {
		r.spill(w)
	}
	port := w.cursor
	w.cursor++
	if w.cursor == len(w.Out) {
		r.results.Pop()
	}
	w.held[port] = true
	r.yielded++
	r.unclaimed++
	return engine.Out{
		Port: port, Desc: r.outs[port], Off: w.index * r.plan.blockRows * r.plan.outRow[port],
		Data: w.Out[port], Release: w.release[port],
	}, true, nil
}

// Stats implements engine.Run.
func (r *run) Stats() engine.Stats {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stats
}

// Close implements engine.Run. It waits for running blocks and unreleased results, at
// most Config.CloseWait. What is in use then stays the run's, and its budget's, until it is
// not. Blocks that still run are a *LostError; results still held, or unread by a peer,
// are no error. A second Close does nothing and returns ErrClosed.
func (r *run) Close() error {
	r.cancel(engine.ErrClosed)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return engine.ErrClosed
	}
	r.closed = true
	if c, ok := r.engine.cfg.Device.(Canceler); ok && r.active > 0 {
		r.mu.Unlock()
		c.Cancel(r.ctx)
		r.mu.Lock()
	}
	if r.active+r.unclaimed > 0 {
		timeout := time.NewTimer(r.engine.cfg.CloseWait)
		defer timeout.Stop()
		for late := false; r.active+r.unclaimed > 0 && !late; {
			r.mu.Unlock()
			select {
			case <-r.idle:
			case <-timeout.C:
				late = true
			}
			r.mu.Lock()
		}
	}
	var err error
	if r.active > 0 {
		r.stopped = make(chan struct{})
		err = &engine.LostError{
			Text:  fmt.Sprintf("model %q: %d blocks still run %v after Close", r.info.Name, r.active, r.engine.cfg.CloseWait),
			Ended: r.stopped,
		}
	}
	r.over = true
	r.giveBack()
	return err
}

// late tells Close, or does what Close could not wait for; mu is held.
func (r *run) late() {
	wake(r.idle)
	if r.over {
		r.giveBack()
	}
}

// giveBack returns the run's memory, except what is still in use; mu is held.
func (r *run) giveBack() {
	var used int64
	if r.active+r.unclaimed > 0 { // results may lie in the whole inputs
		used = r.plan.wholeBytes + r.plan.fixed
	} else {
		if r.whole != nil {
			drop(&r.whole.slab)
		}
		r.engine.leave(r)
	}
	for _, s := range r.slots {
		if s.state == slotActive || s.work != nil && s.work.inUse() {
			used += r.plan.inBlock
		} else {
			drop(&s.slab)
		}
	}
	for _, w := range r.works {
		switch {
		case !w.inUse():
			w.letGo()
			if w.spilled {
				r.unspill(w)
			}
			drop(&w.slab)
		case w.slab != nil && !w.spilled:
			used += r.plan.outBlock
		}
	}
	r.giveUp(r.granted - used)
	if r.stopped != nil && r.active == 0 {
		close(r.stopped)
		r.stopped = nil
	}
}

// drop releases what take took.
func drop(s **slab.Slab) {
	if *s != nil {
		(*s).Release()
		*s = nil
	}
}

func bytesOf(s *slab.Slab) []byte {
	if s == nil {
		return nil
	}
	return s.Bytes()
}

// wake leaves a token for the one who waits on c, if there is none yet.
func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
