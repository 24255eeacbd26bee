package serving

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/internal/failures"
	"github.com/tensorferry/tensorferry/tensor"
)

// Run is a call outside a session. Its inputs are written, its results are taken, and End
// ends it. Input side: Write. Output side: Next. One goroutine per side. End may be called
// from any goroutine.
type Run struct {
	core   *Core
	from   *admission.Caller
	id     tensor.ID
	model  string
	began  time.Time
	ctx    context.Context
	cancel context.CancelCauseFunc
	unhook func() bool // from the end of the core
	run    *opened

	mu      sync.Mutex // held while a block is written; guards all below
	blocks  []filling  // borrowed and not full, in order
	missing int64      // bytes of all inputs not yet written
	left    []int64    // bytes of each, by input port, that Write has not been given
	ended   bool

	held sync.Map // keys: of results taken, *func() that release them, once
}

// filling is a block that is being written.
type filling struct {
	*engine.Block
	rest [][]byte // by input port: memory not yet written; nil if the port has none in this block
}

// Open admits a call of a model and opens its run, waiting for memory as long as a session's
// call does. The call's inputs may be in any order; the port of the only one may be empty. The
// run ends when ctx or the core does. End must follow. An error is a *terms.RefusedError, and
// the call has then been counted as ended.
func (c *Core) Open(ctx context.Context, from *admission.Caller, model string, call engine.Call) (*Run, error) {
	r, err := c.admit(ctx, from, model, call, nil)
	if err != nil {
		return nil, err
	}
	r.left = make([]int64, len(r.run.order))
	for port, i := range r.run.order {
		n, _ := call.Inputs[i].Desc.Bytes() // checked
		r.missing += n
		r.left[port] = n
	}
	if r.missing == 0 {
		if err := r.Write(ctx, -1, nil); err != nil {
			return nil, r.End(err)
		}
	}
	return r, nil
}

// admit counts a call that begins and, unless bad says why not, opens its run. After an error
// it has been counted as ended; else end must follow.
func (c *Core) admit(ctx context.Context, from *admission.Caller, model string, call engine.Call, bad error) (*Run, error) {
	if err := c.Begin(); err != nil {
		return nil, err
	}
	if err := c.Enter(admission.Calls, from); err != nil {
		c.End()
		return nil, err
	}
	c.callsUnary.Add(1)
	if call.ID.IsZero() {
		call.ID = tensor.NewID()
	}
	call.Principal = from.Principal()
	r := &Run{core: c, from: from, id: call.ID, model: model, began: time.Now()}
	r.ctx, r.cancel = context.WithCancelCause(ctx)
	r.unhook = context.AfterFunc(c.ctx, func() { r.cancel(failures.ErrShutdown) })
	switch problem := cmp.Or(frame.CheckName("model", model), frame.CheckEntries("params", call.Params)); {
	case bad != nil:
	case model == "":
		bad = fmt.Errorf("%w: the model's name is empty", failures.ErrPorts)
	case problem != "":
		bad = fmt.Errorf("%w: %s", failures.ErrPorts, problem)
	default:
		r.run, bad = c.open(r.ctx, r.cancel, model, call, nil)
	}
	if bad != nil {
		return nil, r.end(bad)
	}
	return r, nil
}

// Info describes the model.
func (r *Run) Info() engine.Info { return r.run.info }

// Write copies data to the next bytes of an input, given by its index in the call. It
// waits for memory. If a model has several inputs of rows, they must be written alternately
// or from goroutines of their own. After End the error is engine.ErrClosed.
func (r *Run) Write(ctx context.Context, input int, data []byte) error {
	port := slices.Index(r.run.order, input)
	for fresh := len(data); ; fresh = 0 {
		n, missing, err := r.write(port, fresh, data)
		if data = data[n:]; err != nil || len(data) == 0 && missing > 0 {
			return err
		}
		if n > 0 && missing > 0 {
			continue
		}
		b, err := r.run.Borrow(ctx) // or the last blocks, whose rows have no bytes
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		r.mu.Lock()
		r.blocks = append(r.blocks, filling{b, slices.Clone(b.In)})
		r.mu.Unlock()
	}
}

// write copies to the first block with room for the port, returns full blocks to the run,
// and reports how many bytes of all inputs are still missing. The first fresh bytes of data
// have not been seen before.
func (r *Run) write(port, fresh int, data []byte) (n int, missing int64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return 0, 0, engine.ErrClosed
	}
	if port >= 0 {
		if over := int64(fresh) - r.left[port]; over > 0 { // before its last rows are computed
			return 0, 0, fmt.Errorf("%w: input %d has %d bytes more than its desc", failures.ErrPorts, r.run.order[port], over)
		}
		r.left[port] -= int64(fresh)
	}
	r.blocks = slices.DeleteFunc(r.blocks, func(b filling) bool {
		if n == 0 && port >= 0 {
			n = copy(b.rest[port], data)
			b.rest[port] = b.rest[port][n:]
		}
		full := !slices.ContainsFunc(b.rest, func(m []byte) bool { return len(m) > 0 })
		if full {
			r.run.Filled(b.Block)
		}
		return full
	})
	r.missing -= int64(n)
	return n, r.missing, nil
}

// Next returns the next result, as engine.Run.Next does, in any order. The error is io.EOF
// when all results are complete. If ctx ends, its error is returned unchanged.
func (r *Run) Next(ctx context.Context) (engine.Out, error) {
	o, err := r.run.Next(ctx)
	if err != nil {
		return o, err
	}
	once := new(sync.OnceFunc(o.Release))
	r.held.Store(once, nil)
	o.Release = func() {
		r.held.Delete(once)
		(*once)()
	}
	return o, nil
}

// Ended reports whether End has been called.
func (r *Run) Ended() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ended
}

// Abandon ends a run whose owner has left it, with err, and releases the results it holds.
// After End it is a no-op.
func (r *Run) Abandon(err error) {
	for release := range r.held.Range {
		(*release.(*func()))()
	}
	_ = r.End(err) // nobody is left to report it to
}

// Context returns a context that ends with the run: with the RPC, the timeout, the server,
// or End.
func (r *Run) Context() context.Context { return r.ctx }

// End closes the run and counts the call as ended with err, or as successful if err is nil.
// Only the first call counts. All results must have been released. End returns what the
// handler must return: why the run was cancelled, if it was, or else err, as a
// *terms.RefusedError unless it is the status of the handler's own.
func (r *Run) End(err error) error {
	r.mu.Lock()
	again := r.ended
	r.ended = true
	r.mu.Unlock()
	if again {
		return err
	}
	own := r.core.Own(err)
	told := err
	if own != nil {
		told = own
	}
	r.cancel(told)    // wakes those who wait for memory or results
	_ = r.run.Close() // which tells the core
	if told = r.end(told); own != nil && errors.Is(told, own) {
		return err
	}
	return told
}

// end counts a call that has ended.
func (r *Run) end(err error) error {
	if cause := context.Cause(r.ctx); err != nil && cause != nil { // the cause outranks what it caused
		err = cause
	}
	r.unhook()
	r.cancel(nil)
	defer r.core.End()
	defer r.core.Leave(admission.Calls, r.from)
	if err == nil {
		r.core.callEnded(r.model, frame.OK, time.Since(r.began))
		return nil
	}
	why := failures.ExplainCall(err)
	if why.Secret {
		why.Text = fmt.Sprintf("%s (call %s)", why.Text, r.id) // a caller without a session has no other way to learn it
		r.core.Failed(r.ctx, r.id, r.model, why.Code, err)
	}
	r.core.callEnded(r.model, why.Code, time.Since(r.began))
	return why
}

// Compute runs a model on tensors in memory, those of the call's inputs, of which only the
// ports are given, and returns copies of the outputs, in the order of the ports of info. It
// borrows in. Inputs and outputs may take up to most bytes in each direction; take is asked
// before each output is made. An error is a *terms.RefusedError.
func (c *Core) Compute(ctx context.Context, from *admission.Caller, model string, call engine.Call, in []tensor.Tensor, most int64, take func(bytes int64) error) (out []tensor.Tensor, info engine.Info, st engine.Stats, err error) {
	r, err := c.admit(ctx, from, model, call, describe(call.Inputs, in, most))
	if err != nil {
		return nil, info, st, err
	}
	ordered := make([]tensor.Tensor, len(in))
	for port, i := range r.run.order {
		ordered[port] = in[i]
	}
	left := most
	out, st, err = engine.Collect(r.ctx, r.run.info, r.run, ordered, func(bytes int64) error {
		if left -= bytes; left < 0 {
			return fmt.Errorf("%w: the outputs have more than %d bytes; a session has no such limit", tensor.ErrTooLarge, most)
		}
		return take(bytes)
	})
	return out, r.run.info, st, r.end(err)
}

// describe completes a model's inputs for tensors in memory.
func describe(inputs []engine.Input, in []tensor.Tensor, most int64) error {
	left := most
	for i, t := range in {
		if _, err := tensor.New(t.Desc, t.Data); err != nil {
			return fmt.Errorf("%w: input %q: %w", failures.ErrPorts, inputs[i].Port, err)
		}
		if left -= int64(len(t.Data)); left < 0 {
			return fmt.Errorf("%w: the inputs have more than %d bytes; a session has no such limit", tensor.ErrTooLarge, most)
		}
		inputs[i].Desc, inputs[i].ChunkBytes = t.Desc, tensor.ChunkFor(t.Desc, min(most, engine.ChunkBytes))
	}
	return nil
}

// opened is the run of a call, whose Close tells the core how it ended.
type opened struct {
	engine.Run
	info  engine.Info
	order []int // for each input port of the model, the index of its input in the call
	rows  int64 // of a step
	over  func(closed error)
}

// Close closes the run.
func (o *opened) Close() error {
	err := o.Run.Close()
	o.over(err)
	return err
}

// open opens a run of a model, if the sender of ctx's RPC may, for a call whose inputs are in
// any order. It is a step of q, unless that is nil. If it has to wait for memory for too long,
// it calls cancel, which must cancel ctx. Close must follow.
func (c *Core) open(ctx context.Context, cancel context.CancelCauseFunc, model string, call engine.Call, q *sequence) (o *opened, err error) {
	var m engine.Model
	var over func(error)
	if q != nil {
		m, over = q.model, q.lose
	} else if m, over, err = c.model(ctx, model); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			over(nil)
		}
	}()
	o = &opened{over: over}
	if o.info, o.order, call.Inputs, err = bind(m.Info(), call.Inputs); err != nil {
		return nil, err
	}
	if q != nil {
		if o.rows, err = q.prepare(ctx, &call); err != nil {
			return nil, err
		}
	}
	var bytes int64
	for _, in := range call.Inputs {
		n, _ := in.Desc.Bytes() // checked
		bytes += n
	}
	if bytes <= min(frame.AllowanceCeiling, c.Budget.Limit()/smallShare/smallCalls) { // it need not wait behind large ones
		call.Principal = call.Principal.In(c.Smalls)
	}
	defer c.Patience(cancel, c.waited).Stop()
	defer engine.Recovered(o.info.Name, &err)
	o.Run, err = m.Open(ctx, call)
	return o, err
}

// bind puts inputs in the order of the ports of info, the model to such a call, and returns the index of each among in.
func bind(model engine.Info, in []engine.Input) (info engine.Info, order []int, inputs []engine.Input, err error) {
	if info = model.Of(in); len(in) != len(info.Inputs) {
		return info, nil, nil, unbound(model, in)
	}
	order, inputs = make([]int, len(in)), make([]engine.Input, len(in))
	for p, port := range info.Inputs {
		i := slices.IndexFunc(in, func(i engine.Input) bool { return i.Port == port.Name || i.Port == "" && len(in) == 1 })
		if i < 0 {
			return info, nil, nil, unbound(model, in)
		}
		order[p], inputs[p] = i, in[i]
		inputs[p].Port = port.Name
	}
	return info, order, inputs, nil
}

// unbound says which inputs a model takes, with a question mark those that may be missing, and which a call has.
func unbound(info engine.Info, in []engine.Input) error {
	takes, has := make([]string, len(info.Inputs)), make([]string, len(in))
	for p, port := range info.Inputs {
		if takes[p] = port.Name; port.Optional {
			takes[p] += "?"
		}
	}
	for i := range in {
		has[i] = in[i].Port
	}
	return fmt.Errorf("%w: %q takes inputs %q, the call has %q", failures.ErrPorts, info.Name, takes, has)
}
