package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// ErrLost is wrapped when Close gave up waiting for memory that is still in use.
// That memory is not used again before whoever uses it has let go.
var ErrLost = errors.New("engine: memory still in use")

// bound is a model tied to one call: what comes out and how a block is computed.
type bound struct {
	outs       []tensor.Desc
	kernel     RowsFunc // computes one block
	inPlace    bool     // the result lies where the input did
	scratchRow int64    // memory that kernel needs beside, per row of a block,
	scratch    int64    // and per block
	fixed      int64    // bytes charged beside blocks

	// A foreign model brings the memory of its results, which may also be its
	// input's: foreign computes the only block of its run.
	foreign func(context.Context, RowBlock) ([]tensor.Tensor, error)
}

// ownResults reports whether results have slots of their own.
func (b *bound) ownResults() bool { return !b.inPlace && b.foreign == nil }

// run is one call in progress in host memory. Blocks wait in three places: free
// slots wait for Lend, pending ones (filled) for result memory, the others in the
// host's queue for a worker. Slots and their closures are made once: a block
// allocates nothing.
//
// Where results have slots of their own, a block starts only inside a window:
// below the oldest block with unreleased results plus the number of result slots.
// So the results that one chunk spans always get memory, however far the input
// has come ahead of a block that is still missing.
type run struct {
	host   *Host
	name   string
	holder *slab.Principal
	plan   plan
	bound  bound
	ctx    context.Context
	cancel context.CancelCauseFunc

	// One token each: something changed for the one who waits.
	lendable, nextable, idle chan struct{}

	slots   []*slot
	results []*result
	whole   *slot // the block of Whole inputs, nil without any

	mu        sync.Mutex
	outs      []tensor.Desc
	granted   int64 // bytes of the budget
	closed    bool
	over      bool // Close has waited long enough
	stats     Stats
	free      []*slot // the last one is lent next: its memory is the warmest
	lent      int64   // blocks lent so far
	pending   []*slot // descending by index: the lowest is the last
	active    int     // blocks queued or being computed
	freeOut   []*result
	low       int64  // the oldest block with unreleased results
	done      []bool // results released, by index modulo the window
	headOut   *result
	tailOut   *result
	yielded   int64 // results given out by Next
	unclaimed int   // of those, not yet released
}

type slotState uint8

const (
	slotFree slotState = iota
	slotLent
	slotFilled
	slotActive // queued or being computed
	slotShared // computed in place, results not all released
)

// slot is the memory of one block of input.
type slot struct {
	run   *run
	index int64
	state slotState
	block Block
	rb    RowBlock
	slab  *slab.Slab // nil until first needed
	out   *result    // while active, and always where results share the slot
	next  *slot      // in the host's queue
}

// result is the memory of one block's outputs.
type result struct {
	index   int64
	slot    *slot      // whose memory it shares, if it does
	slab    *slab.Slab // otherwise; nil until first needed
	data    [][]byte   // by output port
	release []func()   // by output port
	held    []bool     // by output port: given out and not released
	writing bool       // its block is active
	cursor  int        // the next port to give out
	left    int        // ports not released
	next    *result    // in the run's queue
}

// start takes the memory of a run, the minimum first and all of it or nothing,
// and lays out its slots.
func start(ctx context.Context, h *Host, info Info, c Call, p plan, b bound) (*run, error) {
	begin := time.Now()
	least := p.least()
	if err := h.budget.Acquire(ctx, c.Principal, least); err != nil {
		return nil, fmt.Errorf("engine: model %q: memory for the call: %w", info.Name, err)
	}
	r := &run{
		host: h, name: info.Name, holder: c.Principal, plan: p, bound: b, outs: b.outs, granted: least,
		lendable: make(chan struct{}, 1), nextable: make(chan struct{}, 1), idle: make(chan struct{}, 1),
	}
	r.stats.Queue = time.Since(begin)
	r.ctx, r.cancel = context.WithCancelCause(ctx)

	in, out := p.minIn, p.minOut
	for more := true; more; { // in turns: slots of one direction alone speed nothing up
		more = false
		if in < p.wantIn && h.budget.TryAcquire(c.Principal, p.inBlock) {
			in, r.granted, more = in+1, r.granted+p.inBlock, true
		}
		if out < p.wantOut && h.budget.TryAcquire(c.Principal, p.outBlock) {
			out, r.granted, more = out+1, r.granted+p.outBlock, true
		}
	}

	inputs := descs(c)
	newSlot := func() *slot {
		s := &slot{run: r, block: Block{In: make([][]byte, len(info.Inputs))}}
		s.block.Slot = s
		return s
	}
	if slices.ContainsFunc(info.Inputs, func(p Port) bool { return p.Whole }) {
		r.whole = newSlot()
		r.whole.block.Whole = true
	}
	for range in {
		s := newSlot()
		s.rb = RowBlock{In: s.block.In, Descs: inputs, OutDescs: b.outs, Params: c.Params}
		if r.whole != nil {
			s.rb.Whole = r.whole.block.In
		}
		if !b.ownResults() {
			s.out = r.newResult(len(info.Outputs))
			s.out.slot = s
		}
		r.slots = append(r.slots, s)
	}
	for range out {
		r.results = append(r.results, r.newResult(len(info.Outputs)))
	}
	r.free, r.freeOut = slices.Clone(r.slots), slices.Clone(r.results)
	r.pending = make([]*slot, 0, in)
	r.done = make([]bool, out)
	return r, nil
}

func (r *run) newResult(ports int) *result {
	o := &result{data: make([][]byte, ports), release: make([]func(), ports), held: make([]bool, ports)}
	for port := range ports {
		o.release[port] = func() { r.released(o, port) }
	}
	return o
}

// Lend implements Run.
func (r *run) Lend(ctx context.Context) (*Block, error) {
	for {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if b, err := r.lend(); b != nil || err != nil {
			return b, err
		}
		select {
		case <-r.lendable:
		case <-ctx.Done():
		case <-r.ctx.Done():
		}
	}
}

func (r *run) lend() (*Block, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.closed:
		return nil, ErrClosed
	case r.lent == r.plan.blocks:
		return nil, io.EOF
	case r.ctx.Err() != nil:
		return nil, context.Cause(r.ctx)
	case r.whole != nil && r.whole.state == slotFree:
		s := r.whole
		s.state = slotLent
		if err := s.need(r.plan.wholeBytes); err != nil {
			return nil, err
		}
		carve(bytesOf(s.slab), s.block.In, r.plan.whole, 1)
		return &s.block, nil
	case len(r.free) == 0:
		return nil, nil
	}
	s := r.free[len(r.free)-1]
	r.free = r.free[:len(r.free)-1]
	s.index, s.state = r.lent, slotLent
	r.lent++
	if err := s.need(r.plan.inBlock); err != nil {
		return nil, err
	}
	s.block.Row, s.block.Rows = r.plan.span(s.index)
	carve(bytesOf(s.slab), s.block.In, r.plan.inRow, s.block.Rows)
	return &s.block, nil
}

// Filled implements Run.
func (r *run) Filled(b *Block) {
	s := b.Slot.(*slot)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return // the memory went back with Close
	}
	if s.run != r || s.state != slotLent {
		panic("engine: Filled with a block that is not lent")
	}
	s.state = slotFilled
	if s != r.whole {
		at := len(r.pending)
		for at > 0 && r.pending[at-1].index < s.index {
			at--
		}
		r.pending = slices.Insert(r.pending, at, s)
	}
	r.schedule()
}

// schedule queues every block that may start, ascending. The caller holds mu.
func (r *run) schedule() {
	if r.whole != nil && r.whole.state != slotFilled {
		return
	}
	for len(r.pending) > 0 {
		s := r.pending[len(r.pending)-1]
		if r.bound.ownResults() {
			if s.index >= r.low+int64(len(r.results)) {
				return
			}
			// Inside the window fewer blocks have results than there are slots.
			s.out = r.freeOut[len(r.freeOut)-1]
			r.freeOut = r.freeOut[:len(r.freeOut)-1]
		}
		r.pending = r.pending[:len(r.pending)-1]
		if err := r.prepare(s); err != nil {
			r.cancel(err)
			return
		}
		if !r.host.submit(s) {
			r.cancel(ErrClosed)
			return
		}
		s.state, s.out.writing = slotActive, true
		r.active++
	}
}

// prepare points a block at its memory.
func (r *run) prepare(s *slot) (err error) {
	o := s.out
	o.index = s.index
	s.rb.Row, s.rb.Rows = s.block.Row, s.block.Rows
	switch {
	case r.bound.foreign != nil:
		return nil
	case r.bound.inPlace:
		o.data[0] = split(s.block.In)
	default:
		if o.slab == nil {
			if o.slab, err = r.host.take(r.plan.outBlock); err != nil {
				return err
			}
		}
		s.rb.scratch = carve(bytesOf(o.slab), o.data, r.plan.outRow, s.block.Rows)
	}
	s.rb.Out = o.data
	return nil
}

// compute runs on a worker of the host, or on whoever waits in Next.
func (r *run) compute(s *slot) {
	begin := time.Now()
	skip := r.ctx.Err() != nil
	var err error
	if !skip {
		err = r.call(s)
	}
	spent := time.Since(begin)
	if err != nil {
		r.cancel(err) // the first cause stands
	}

	r.mu.Lock()
	defer r.mu.Unlock()
	o := s.out
	r.active--
	o.writing = false
	s.state = slotFree
	if r.closed {
		r.late()
		return
	}
	if skip || err != nil {
		return // Next reports it; nothing more is started
	}
	r.stats.Compute += spent
	r.stats.Blocks++
	o.cursor, o.left, o.next = 0, len(o.data), nil
	if r.headOut == nil {
		r.headOut = o
	} else {
		r.tailOut.next = o
	}
	r.tailOut = o
	wake(r.nextable)
	if o.slot != nil {
		s.state = slotShared
		return
	}
	s.out = nil
	r.free = append(r.free, s)
	wake(r.lendable)
}

// call runs the model's own code on one block.
func (r *run) call(s *slot) (err error) {
	defer recovered(r.name, &err)
	if r.bound.foreign != nil {
		results, err := r.bound.foreign(r.ctx, s.rb)
		if err != nil {
			return failed(r.name, err)
		}
		outs := make([]tensor.Desc, len(results))
		for i, t := range results {
			outs[i], s.out.data[i] = t.Desc, t.Data
		}
		r.mu.Lock()
		r.outs = outs
		r.mu.Unlock()
		return nil
	}
	if s.rb.Rows == 0 {
		return nil
	}
	if err := r.bound.kernel(r.ctx, s.rb); err != nil {
		return failed(r.name, fmt.Errorf("rows [%d,+%d): %w", s.rb.Row, s.rb.Rows, err))
	}
	return nil
}

// Next implements Run.
func (r *run) Next(ctx context.Context) (Out, error) {
	for {
		if ctx.Err() != nil {
			return Out{}, context.Cause(ctx)
		}
		if o, ok, err := r.pop(); ok || err != nil {
			return o, err
		}
		if r.helped() && r.host.help(r) {
			continue
		}
		select {
		case <-r.nextable:
		case <-ctx.Done():
		case <-r.ctx.Done():
		}
	}
}

// helped reports whether Next computes the run's block itself: there is only one,
// so no other result is held up, and it is small.
func (r *run) helped() bool { return r.plan.blocks == 1 && r.plan.inBlock <= helpBytes }

func (r *run) pop() (Out, bool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.closed:
		return Out{}, false, ErrClosed
	case r.yielded == r.plan.blocks*int64(len(r.plan.outRow)):
		return Out{}, false, io.EOF
	case r.ctx.Err() != nil:
		return Out{}, false, context.Cause(r.ctx)
	case r.headOut == nil:
		return Out{}, false, nil
	}
	o := r.headOut
	port := o.cursor
	o.cursor++
	if o.cursor == len(o.data) {
		r.headOut = o.next
	}
	o.held[port] = true
	r.yielded++
	r.unclaimed++
	return Out{
		Port: port, Desc: r.outs[port], Off: o.index * r.plan.blockRows * r.plan.outRow[port],
		Data: o.data[port], Release: o.release[port],
	}, true, nil
}

// released is every Out's Release.
func (r *run) released(o *result, port int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !o.held[port] {
		panic("engine: result released more than once")
	}
	o.held[port] = false
	r.unclaimed--
	o.left--
	switch {
	case r.closed:
		r.late()
	case o.left > 0:
	case o.slot != nil:
		o.slot.state = slotFree
		r.free = append(r.free, o.slot)
		wake(r.lendable)
	default:
		r.freeOut = append(r.freeOut, o)
		window := int64(len(r.done))
		r.done[o.index%window] = true
		for r.done[r.low%window] {
			r.done[r.low%window] = false
			r.low++
		}
		r.schedule()
	}
}

// Stats implements Run.
func (r *run) Stats() Stats {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stats
}

// Close implements Run. It waits for running blocks and unreleased results, at
// most five seconds; past them their memory is lost and the error wraps ErrLost.
// A second Close does nothing and returns ErrClosed.
func (r *run) Close() error {
	r.cancel(ErrClosed)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return ErrClosed
	}
	r.closed = true
	r.active -= r.host.drop(r)
	if r.active+r.unclaimed > 0 {
		timeout := time.NewTimer(closeWait)
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
	if r.active+r.unclaimed > 0 {
		err = fmt.Errorf("%w: model %q: %d running blocks and %d unreleased results %v after Close; their memory is abandoned",
			ErrLost, r.name, r.active, r.unclaimed, closeWait)
	}
	r.over = true
	r.giveBack()
	r.host.budget.Release(r.holder, r.granted)
	r.granted = 0
	return err
}

// late tells Close, or does what Close could not wait for.
func (r *run) late() {
	wake(r.idle)
	if r.over {
		r.giveBack()
	}
}

// giveBack returns the run's memory, except what is still in use.
func (r *run) giveBack() {
	if r.whole != nil && r.active == 0 {
		r.whole.drop()
	}
	for _, s := range r.slots {
		if s.state != slotActive && (s.state != slotShared || !slices.Contains(s.out.held, true)) {
			s.drop()
		}
	}
	for _, o := range r.results {
		if o.slab != nil && !o.writing && !slices.Contains(o.held, true) {
			o.slab.Release() // taken in prepare
			o.slab = nil
		}
	}
}

// need takes the slot's memory the first time. drop is the other half.
func (s *slot) need(bytes int64) (err error) {
	if s.slab == nil {
		if s.slab, err = s.run.host.take(bytes); err != nil {
			s.run.cancel(err)
		}
	}
	return err
}

func (s *slot) drop() {
	if s.slab != nil {
		s.slab.Release()
		s.slab = nil
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
