package blocks

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
	"unsafe"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// RowBlock is the same range of rows of every input and output of a call. A model
// whose Info.Rows is 0 has one block, with each tensor whole in one piece. Its
// memory is lent to whoever computes it, and so are the slices.
type RowBlock struct {
	Row, Rows int64             // Rows is 1 or more, but where results are Given: else empty tensors are not computed
	In        [][]byte          // by input port; nil for a Whole one
	Whole     [][]byte          // by input port; nil for one that is split, read-only
	Out       [][]byte          // by output port; every byte is to be written. In place, Out[0] is the input's memory
	Descs     []tensor.Desc     // of the whole inputs, read-only
	OutDescs  []tensor.Desc     // of the whole outputs, read-only
	Params    map[string]string // of the call, read-only
}

// Times is where the time of a block went.
type Times struct{ H2D, Compute, D2H time.Duration }

// Work is one block on its way through a device, and the memory of its results.
// The device's side is exported: it belongs to one goroutine at a time, and to none
// of the device's after Done.
type Work struct {
	RowBlock
	Program any // what the model's Bound says

	run     *run
	next    *Work // in a Queue: a device's, then the run's
	state   workState
	index   int64
	slot    *slot // its input; nil from InputFree on
	slab    *slab.Slab
	given   func()    // lets go of what Give handed over
	bad     error     // what is wrong with it
	release []func()  // by output port
	held    []bool    // by output port: given out and not released
	cursor  int       // the next port to give out
	since   time.Time // it waits to be given out
	spilled bool      // its results were copied out
	shared  bool      // some of its results lie in the input
	left    int       // ports not released
}

type workState uint8

const (
	workIdle workState = iota
	workStarted
	workDone
	workLost // with its device; the run is over
)

// errNotGiven is what is wrong with results before they are given.
var errNotGiven = errors.New("done without results")

// Context ends when the run does: computing the block is then in vain.
func (w *Work) Context() context.Context { return w.run.ctx }

// Principal holds the memory of the block's run. It is nil where nobody does by name.
func (w *Work) Principal() *slab.Principal { return w.run.holder }

// Model is the name of the model, for logs and panics.
func (w *Work) Model() string { return w.run.info.Name }

// InputFree says, before Done, that the device has copied In: its memory is lent
// for another block. It has no effect where results are InPlace or Given: the input is
// free with Done, or if they lie in it, when they are released.
func (w *Work) InputFree() {
	r := w.run
	r.mu.Lock()
	defer r.mu.Unlock()
	if w.state == workStarted && r.bound.Results == Own {
		w.In = nil
		r.freeInput(w)
		r.launch()
	}
}

// Give hands over the results of a block whose Bound says Given, one tensor per
// output: the desc of all of it, which every block agrees on, and the data of this
// block. They are shared until
// release, which may be nil, is called, once, by whoever lets go of them last and
// perhaps in Give; it does not block, calls nothing of this package, and takes no lock
// that the device holds while it does. What does not fit the model's info fails the call.
// A block gives its results once.
func (w *Work) Give(outs []tensor.Tensor, release func()) {
	r := w.run
	r.mu.Lock()
	defer r.mu.Unlock()
	if w.state != workStarted {
		if release != nil {
			release()
		}
		return
	}
	if w.given, w.bad = release, r.misfit(w, outs); w.bad != nil {
		return
	}
	for i, t := range outs {
		w.Out[i] = t.Data
		w.shared = w.shared || lies(t.Data, bytesOf(w.slot.slab))
	}
}

// misfit says what is wrong with given results. It learns from the first what outputs are, if they
// fit the model's info and the run's rows, and widens the window to a chunk of them; mu is held.
func (r *run) misfit(w *Work, outs []tensor.Tensor) error {
	ports := r.info.Outputs
	if len(outs) != len(ports) {
		return fmt.Errorf("returned %d outputs, its info says %d", len(outs), len(ports))
	}
	if r.outs == nil {
		descs := make([]tensor.Desc, len(outs))
		for i, t := range outs {
			descs[i] = t.Desc.Clone()
		}
		if err := r.plan.describe(r.info, descs); err != nil {
			return err
		}
		r.outs = descs
		r.plan.window()
		for r.window < r.plan.wantOut {
			r.addOut()
		}
	}
	for i, t := range outs {
		if !t.Desc.Equal(r.outs[i]) {
			return fmt.Errorf("output %q is %v, it was to be %v", ports[i].Name, t.Desc, r.outs[i])
		}
		if n := w.Rows * r.plan.outRow[i]; int64(len(t.Data)) != n {
			return fmt.Errorf("output %q has %d bytes in %d rows, wanted %d", ports[i].Name, len(t.Data), w.Rows, n)
		}
	}
	return nil
}

// lies reports whether data is part of mem.
func lies(data, mem []byte) bool {
	if len(data) == 0 || len(mem) == 0 {
		return false
	}
	at, begin := uintptr(unsafe.Pointer(&data[0])), uintptr(unsafe.Pointer(&mem[0]))
	return at >= begin && at-begin < uintptr(len(mem))
}

// Offer lets whoever waits in Next have w computed, by Help, and reports whether
// that is worth it: the device then wakes nobody.
func (w *Work) Offer() bool {
	if w.run.help == nil {
		return false
	}
	wake(w.run.nextable)
	return true
}

// Done says that the device has computed the block, or why not, and let go of its memory.
func (w *Work) Done(err error, t Times) {
	r := w.run
	r.mu.Lock()
	defer r.mu.Unlock()
	switch w.state {
	case workStarted:
		r.finish(w, err, t)
		r.launch()
	case workLost:
	default:
		panic("blocks: Done with a block that is not started")
	}
}

// End is Done for a block that is not computed: because its run has ended, or else why.
func (w *Work) End(why error) {
	if cause := context.Cause(w.Context()); cause != nil {
		why = cause
	}
	w.Done(why, Times{})
}

// finish takes a started block back from the device; mu is held.
func (r *run) finish(w *Work, err error, t Times) {
	if err == nil {
		err = w.bad
	}
	w.state = workDone
	r.active--
	r.freeInput(w)
	if err != nil {
		where := ""
		if r.bound.Results != Given {
			where = fmt.Sprintf("rows [%d,+%d): ", w.Row, w.Rows)
		}
		r.fail(failed(r.info.Name, where, err))
	}
	if r.closed || err != nil { // Next reports it; nothing more is started
		w.letGo()
		r.late()
		return
	}
	r.stats.H2D += t.H2D
	r.stats.Compute += t.Compute
	r.stats.D2H += t.D2H
	r.stats.Blocks++
	w.cursor, w.left, w.since = 0, len(w.Out), time.Now()
	r.results.Push(w)
	wake(r.nextable)
}

// freeInput gives the input's memory to the next block, unless results are there; mu is held.
func (r *run) freeInput(w *Work) {
	s := w.slot
	switch {
	case s == nil:
	case w.shared:
		s.state, s.work = slotShared, w
	default:
		w.slot = nil
		r.put(s)
	}
}

// letGo ends what Give began; mu is held.
func (w *Work) letGo() {
	if w.given != nil {
		w.given()
		w.given = nil
	}
}

// inUse reports whether somebody may touch the memory of w's results; mu is held.
func (w *Work) inUse() bool { return w.state == workStarted || slices.Contains(w.held, true) }

// released is every Out's Release.
func (w *Work) released(port int) {
	r := w.run
	r.mu.Lock()
	defer r.mu.Unlock()
	if !w.held[port] {
		panic("blocks: result released more than once")
	}
	w.held[port] = false
	r.unclaimed--
	w.left--
	if w.left == 0 {
		w.letGo()
	}
	if r.closed {
		r.late()
		return
	}
	if w.left > 0 {
		return
	}
	if s := w.slot; s != nil {
		w.slot, w.shared, s.work = nil, false, nil
		r.put(s)
	}
	if w.spilled {
		r.unspill(w)
	} else {
		r.freeOut = append(r.freeOut, w)
	}
	r.done[w.index%int64(len(r.done))] = true
	for r.done[r.low%int64(len(r.done))] {
		r.done[r.low%int64(len(r.done))] = false
		r.low++
	}
	r.launch()
}

// lose takes back the blocks that a device had, when the run has ended. One that is
// on its way into Start is met there by a context that has ended.
func (r *run) lose() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, w := range r.works {
		if w.state == workStarted {
			w.state = workLost
			r.active--
			r.freeInput(w)
			w.letGo()
		}
	}
	r.late()
}

// take hands over memory for a block, nil for none.
func (r *run) take(n int64) (*slab.Slab, error) {
	if n == 0 {
		return nil, nil
	}
	s, err := r.engine.cfg.Pool.Get(int(n))
	if err != nil {
		err = fmt.Errorf("engine: model %q: memory for a block: %w", r.info.Name, err)
		r.cancel(err)
	}
	return s, err
}

var _ engine.Run = (*run)(nil)

// Queue is a device's queue of blocks, which guards it. The zero value is empty.
type Queue struct {
	head, tail *Work
	n          int
}

// Len returns how many blocks there are.
func (q *Queue) Len() int { return q.n }

// Head returns the first block, nil without one.
func (q *Queue) Head() *Work { return q.head }

// Push adds a block at the end.
func (q *Queue) Push(w *Work) {
	w.next = nil
	if q.head == nil {
		q.head = w
	} else {
		q.tail.next = w
	}
	q.tail = w
	q.n++
}

// Pop takes the first block, nil without one.
func (q *Queue) Pop() *Work {
	w := q.head
	if w != nil {
		q.head = w.next
		q.n--
	}
	return w
}

// Append moves the blocks of behind to the end, in order.
func (q *Queue) Append(behind *Queue) {
	for w := behind.Pop(); w != nil; w = behind.Pop() {
		q.Push(w)
	}
}

// End ends all blocks, none of which is computed. The device holds no lock of its own.
func (q *Queue) End(why error) {
	for w := q.Pop(); w != nil; w = q.Pop() {
		w.End(why)
	}
}

// Take moves the blocks of a run to the end of another queue, in order.
func (q *Queue) Take(run context.Context, to *Queue) {
	for range q.n {
		if w := q.Pop(); w.Context() == run {
			to.Push(w)
		} else {
			q.Push(w)
		}
	}
}
