package serving

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/internal/failures"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

var (
	// errFinished stops the feeding of a run whose results are complete.
	errFinished = errors.New("serving: results complete")
	// errStopped ends a call that the session has ended. Its result is decided by then, and
	// the error's text reaches nobody.
	errStopped = errors.New("serving: call stopped")
)

// call is one run of a model for a session. From start to end two goroutines work for it:
// one lends the run's blocks to the session, the other takes the run's results.
type call struct {
	session *Session
	id      tensor.ID
	cancel  context.CancelCauseFunc
	alarm   *time.Timer // limits its time, unless nil
	run     *opened     // nil before its model has begun
	feeding sync.WaitGroup

	// Guarded by the session's lock.
	closed   bool // by the session's last event of the call
	idle     bool // no goroutine works for it any more
	inputs   []*input
	model    string        // set once the call is ready, as is the next
	part     *frame.Call   // from then until it begins
	sequence *sequence     // that it is a step of, or nil
	memory   *slab.Account // for the chunk tables of the inputs; nil before it starts
	spare    []*arrival
	arrived  stream.Instant
	lastByte stream.Instant
}

// arrival is a block whose inputs are being received.
type arrival struct {
	block   *engine.Block
	missing int // inputs
	done    func(filled bool)
}

// arrival returns an unused arrival; the session is locked.
func (c *call) arrival(run engine.Run) *arrival {
	if n := len(c.spare); n > 0 {
		a := c.spare[n-1]
		c.spare = c.spare[:n-1]
		return a
	}
	a := new(arrival)
	a.done = func(filled bool) { // if not filled, the call is over, and Close takes the block back
		if filled {
			a.missing--
		}
		if filled && a.missing == 0 {
			run.Filled(a.block)
			c.spare = append(c.spare, a)
		}
	}
	return a
}

// output is one result being sent. It belongs to the taker goroutine.
type output struct {
	id      tensor.ID
	size    int64
	offered int64
	open    bool
}

// start starts the call, whose goroutines end with it; the session is locked.
func (c *call) start(part *frame.Call) {
	ctx, cancel := context.WithCancelCause(c.session.Values)
	c.cancel, c.memory = cancel, c.session.core.Budget.Account(c.session.Holder)
	params, timeout, of := part.Params, time.Duration(min(part.TimeoutMillis, 1<<40))*time.Millisecond, part.Sequence
	c.session.core.work.Add(1)
	c.session.Go(func(t *session.Turn) {
		defer func() { // also where a model's code ends the goroutine
			closed := false
			c.session.Do(func(*stream.Machine, stream.Instant) { closed, c.idle = c.closed, true })
			if closed {
				c.leave()
			}
		}()
		if !c.atOnce(t, params) {
			t.Pass()
			c.work(ctx, timeout, params, of)
		}
	})
}

// work does what the call asks for. A timeout of 0 is none.
func (c *call) work(ctx context.Context, timeout time.Duration, params map[string]string, of *frame.Sequence) {
	if timeout > 0 {
		// Finish, too: the results may be complete, with only nobody taking them.
		c.alarm = time.AfterFunc(timeout, func() {
			c.cancel(context.DeadlineExceeded)
			c.finish(frame.Done{}, context.DeadlineExceeded)
		})
	}
	var err error
	switch {
	case of != nil && of.MaxRows > 0:
		err = c.begin(ctx, *of, params)
	case of != nil && of.End:
		c.end(of.ID)
	default:
		err = c.serve(ctx, params)
	}
	if err != nil {
		c.finish(frame.Done{Refused: true}, c.sequence.failed(err, false))
	}
}

// leave gives up what the call has, when it is closed and no goroutine works for it any more.
func (c *call) leave() {
	core := c.session.core
	if c.run != nil {
		if err := c.run.Close(); err != nil {
			core.Log.Warn("run left memory behind", slog.String("call", c.id.String()), slog.String("error", err.Error()))
		}
	}
	c.sequence.unuse()
	c.release()
	if c.alarm != nil {
		c.alarm.Stop()
	}
	core.Ended(admission.Calls)
	core.work.Done()
}

// serve runs the call, from looking up its model to its last result. An error means that the model did
// not begin to compute.
func (c *call) serve(ctx context.Context, params map[string]string) error {
	core := c.session.core
	var table int64 // of tensors with very many chunks
	inputs := make([]engine.Input, len(c.inputs))
	for i, in := range c.inputs {
		inputs[i] = engine.Input{Port: in.desc.Port, Desc: in.desc.Desc, ChunkBytes: in.geo.ChunkBytes, Name: in.desc.Name, Metadata: in.desc.Metadata}
		table += terms.TableBytes(in.geo.Count())
	}
	if err := core.TakeTable(c.memory, table); err != nil {
		return err
	}
	run, err := core.open(ctx, c.cancel, c.model, engine.Call{ID: c.id, Principal: c.session.Holder, Inputs: inputs, Params: params, Lifetime: c.session.Life()}, c.sequence)
	if err != nil {
		return err
	}
	ordered := make([]*input, len(run.order))
	for p, i := range run.order {
		ordered[p] = c.inputs[i]
	}
	c.session.Do(func(*stream.Machine, stream.Instant) { c.inputs = ordered })
	c.run = run
	c.compute(ctx, run)
	return nil
}

// atOnce computes a small call where its frame was read, if its model can, and reports whether it did. It
// waits for nothing and runs no code of the user's. Errors are left to the ordinary way.
func (c *call) atOnce(t *session.Turn, params map[string]string) bool {
	core, q := c.session.core, c.sequence
	if t == nil || core.Asks || len(c.inputs) != 1 || !q.stateless() {
		return false
	}
	in, call := c.inputs[0], engine.Call{ID: c.id, Principal: c.session.Holder, Params: params}
	if in.staged == nil || !in.whole() || in.geo.Size > engine.AtOnceBytes {
		return false
	}
	var of engine.Model
	if q != nil {
		of = q.model
	} else if m, release, err := core.Models.Lookup(c.model); err == nil {
		defer release()
		of = m
	}
	model, can := of.(engine.Immediate) // not under a wrapper, whose Open may do more
	if !can {
		return false
	}
	info, err, rows := of.Info(), error(nil), int64(0)
	if len(info.Inputs) != 1 || len(info.Outputs) != 1 {
		return false
	}
	call.Inputs = []engine.Input{{Port: info.Inputs[0].Name, Desc: in.desc.Desc, ChunkBytes: in.geo.ChunkBytes}}
	if q != nil {
		rows, err = q.prepare(c.session.Values, &call)
	}
	n, memory := slab.SizeOf(in.geo.Size), core.Budget.Account(c.session.Holder.In(core.Smalls)) // not the call's: gRPC may copy the result when that is over
	if err != nil || in.desc.Port != "" && in.desc.Port != info.Inputs[0].Name || !memory.Take(n) {
		return false
	}
	mem, err := memory.Get(core.Pool, int(in.geo.Size), n)
	if err != nil {
		return false
	}
	begin := time.Now()
	copy(mem.Bytes(), in.staged.Bytes())
	if !model.AtOnce(call, mem.Bytes()) {
		mem.Release()
		return false
	}
	took := time.Since(begin)
	in.staged.Release()
	in.staged = nil
	t.DoSend(int(in.geo.Size), func(m *stream.Machine, now stream.Instant) {
		m.Stay(now, in.desc.Tensor, false)
		outs := make([]output, 1)
		if err = c.announce(m, now, &outs[0], info, engine.Out{Desc: in.desc.Desc, Data: mem.Bytes()}); err == nil {
			err = m.Offer(now, outs[0].id, 0, mem.Bytes(), mem.Release)
		}
		if err == nil {
			q.answered(rows)
			m.Finish(c.done(now, now, info, outs, engine.Stats{Compute: took, Blocks: 1}))
		}
	})
	if err != nil {
		mem.Release()
		c.finish(frame.Done{}, q.failed(err, true))
	}
	return true
}

// TakeTable takes bytes of chunk tables, which may be 0.
func (c *Core) TakeTable(of *slab.Account, bytes int64) error {
	if of.Take(bytes) {
		return nil
	}
	return fmt.Errorf("%w: %d bytes to keep track of so many chunks, the budget is %d; send larger chunks", slab.ErrBudget, bytes, c.Budget.Limit())
}

// compute moves blocks in and results out until the end of the call is decided.
func (c *call) compute(ctx context.Context, run *opened) {
	if !c.feed(ctx, run, 1) { // else there was only one block: a small call needs no other goroutine
		c.feeding.Go(func() { c.feed(ctx, run, math.MaxInt) }) // ends with the last block, or with ctx
	}
	err := c.take(ctx, run)
	if err != nil {
		err = c.sequence.failed(err, true)
		c.finish(frame.Done{Timings: timings(run.Stats())}, err)
	}
	c.cancel(errFinished)
	c.feeding.Wait()
}

// feed lends up to most of the run's next blocks to the session, and copies staged inputs into
// them. It reports whether there are no more blocks to lend.
func (c *call) feed(ctx context.Context, run *opened, most int) (last bool) {
	var widened int64
	for range most {
		b, err := run.Borrow(ctx)
		if err != nil {
			return true // io.EOF, or an error that Next returns, too
		}
		wire := 0
		for i, mem := range b.In {
			if mem == nil {
				continue
			}
			in := c.inputs[i]
			if in.ready == nil {
				wire++
				continue
			}
			select {
			case <-in.ready:
			case <-ctx.Done():
				return true
			}
			if in.staged == nil {
				continue // fully copied: the rows left have no bytes
			}
			in.used += int64(copy(mem, in.staged.Bytes()[in.used:]))
			if in.used == in.geo.Size {
				in.staged.Release() // the call may go on for long; return its share to the peer now
				in.staged = nil
				c.session.Do(func(m *stream.Machine, now stream.Instant) { m.Stay(now, in.desc.Tensor, false) })
			}
		}
		if wire == 0 {
			run.Filled(b)
			if c.usedUp(b) {
				return true
			}
			continue
		}
		var ahead int64
		c.session.Do(func(m *stream.Machine, now stream.Instant) {
			ahead = m.Ahead(now)
			a := c.arrival(run)
			a.block, a.missing = b, wire
			for i, mem := range b.In {
				if in := c.inputs[i]; mem != nil && in.ready == nil && m.Lend(now, in.desc.Tensor, mem, a.done) != nil {
					return // the call is over: Close takes the block back
				}
			}
		})
		if w, ok := run.Run.(engine.Widener); ok && ahead > widened {
			widened = ahead
			w.Widen(ahead)
		}
	}
	return false
}

// usedUp reports whether b was the last block: every input has been copied from the staging
// to its last byte. After Whole inputs, blocks of rows follow, but there may be none.
func (c *call) usedUp(b *engine.Block) bool {
	for i, in := range c.inputs {
		if in.ready == nil || in.used < in.geo.Size || b.In[i] == nil && b.Whole {
			return false
		}
	}
	return true
}

// take offers the run's results to the session, up to the last one.
func (c *call) take(ctx context.Context, run *opened) error {
	info := run.info
	outs := make([]output, len(info.Outputs))
	var first stream.Instant
	for {
		out, err := run.Next(ctx)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if out.Port < 0 || out.Port >= len(outs) {
			out.Release()
			return fmt.Errorf("%w: result for port %d of %d", engine.ErrModel, out.Port, len(outs))
		}
		complete := false
		c.session.DoSend(func(m *stream.Machine, now stream.Instant) {
			if first == 0 {
				first = now
			}
			o := &outs[out.Port]
			if !o.open {
				err = c.announce(m, now, o, info, out)
			}
			if err == nil {
				err = m.Offer(now, o.id, out.Off, out.Data, out.Release)
			}
			if err != nil {
				return
			}
			o.offered += int64(len(out.Data))
			if complete = allComplete(outs); complete {
				c.sequence.answered(run.rows)
				m.Finish(c.done(now, first, info, outs, run.Stats()))
			}
		})
		if err != nil {
			out.Release()
			return err
		}
		if complete {
			return nil
		}
	}
	if !allComplete(outs) {
		return fmt.Errorf("%w: it ended before its results were complete", engine.ErrModel)
	}
	c.session.Do(func(m *stream.Machine, now stream.Instant) { // a model without outputs
		c.sequence.answered(run.rows)
		m.Finish(c.done(now, now, info, outs, run.Stats()))
	})
	return nil
}

func allComplete(outs []output) bool {
	for i := range outs {
		if !outs[i].open || outs[i].offered < outs[i].size {
			return false
		}
	}
	return true
}

// announce opens the tensor of a result. Its chunk size follows the run's blocks, so that
// no chunk spans two of them. If the piece at hand does not reveal the size of a block, no
// chunk is larger than those of the inputs: the run has memory for that many consecutive
// bytes, and a larger chunk would wait forever. The session is locked.
func (c *call) announce(m *stream.Machine, now stream.Instant, o *output, info engine.Info, out engine.Out) error {
	size, err := out.Desc.Bytes()
	if err != nil {
		return err
	}
	limit := m.Status().PeerChunkBytes
	var chunk int64
	n := int64(len(out.Data))
	switch {
	case n == size:
		chunk = tensor.ChunkFor(out.Desc, limit)
	case n == 0 || out.Off+n == size:
		chunk = min(max(n, 1), limit)
		if len(c.inputs) == 0 {
			chunk = max(chunk, min(engine.ChunkBytes, limit))
		}
		for i, in := range c.inputs {
			if !info.Inputs[i].Whole {
				chunk = max(chunk, min(in.geo.ChunkBytes, in.geo.Size, limit))
			}
		}
		chunk = tensor.ChunkFor(out.Desc, chunk)
	default:
		pieces := (n + limit - 1) / limit
		chunk = (n + pieces - 1) / pieces
	}
	if size/chunk >= tensor.MaxChunks {
		chunk = limit
	}
	o.id, o.size, o.open = tensor.NewID(), size, true
	return m.OpenTensor(now, frame.Desc{
		Tensor: o.id, Desc: out.Desc, ChunkBytes: uint32(chunk), Call: c.id, Port: info.Outputs[out.Port].Name, RetainChunks: retainChunks,
	})
}

// done returns the done of a call that succeeded. The session is locked.
func (c *call) done(now, first stream.Instant, info engine.Info, outs []output, st engine.Stats) frame.Done {
	d := frame.Done{Call: c.id, Timings: timings(st)}
	d.Timings.Receive = int64(c.lastByte - c.arrived)
	d.Timings.FirstResult = int64(first - c.arrived)
	d.Timings.Total = int64(now - c.arrived)
	if c.sequence != nil {
		d.Rows = uint64(c.sequence.rows)
	}
	for i := range outs {
		d.Outputs = append(d.Outputs, frame.Binding{Port: info.Outputs[i].Name, Tensor: outs[i].id})
	}
	return d
}

func timings(st engine.Stats) frame.Timings {
	return frame.Timings{Queue: int64(st.Queue), H2D: int64(st.H2D), Compute: int64(st.Compute), D2H: int64(st.D2H)}
}

// Failed records why a call of ctx's RPC failed.
func (c *Core) Failed(ctx context.Context, id tensor.ID, model string, code frame.Code, err error) {
	c.Failures.Add(failures.Failure{At: time.Now(), Call: id, Principal: c.PrincipalOf(ctx), Model: model, Code: code}, err)
}

// finish fails the call with err, unless its end is already decided. Errors that a peer must
// not see are logged.
func (c *call) finish(d frame.Done, err error) {
	if errors.Is(err, errStopped) {
		return // the session decided first
	}
	why := failures.ExplainCall(err)
	if why.Secret && !errors.Is(err, stream.ErrClosed) { // ErrClosed: the session decided while a result was being offered
		c.session.core.Failed(c.session.Values, c.id, c.model, why.Code, err)
	}
	c.session.Do(func(m *stream.Machine, _ stream.Instant) {
		d.Call, d.Code, d.Message, d.RetryAfterMillis, d.Reason = c.id, why.Code, why.Text, why.RetryMillis, why.Reason
		m.Finish(d)
	})
}

// release returns the memory of the call's inputs, which nothing uses any more.
func (c *call) release() {
	for _, in := range c.inputs {
		if in.staged != nil {
			in.staged.Release()
		}
	}
	if c.memory != nil {
		c.memory.Close()
	}
}
