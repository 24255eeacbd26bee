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

// errBinding is wrapped when the inputs of a call do not match the model's ports.
var errBinding = errors.New("serving: inputs do not match the model")

// Request describes a call outside a session.
type Request struct {
	Model   string
	Inputs  []engine.Input    // in any order; the port of the only one may be empty
	Params  map[string]string // read-only
	Timeout time.Duration     // 0: no limit
	// Lifetime ends what a model keeps for the caller beyond the call; nil means never.
	Lifetime context.Context
	// ID is the call's; the zero ID means a new one.
	ID tensor.ID
}

// Run is a call that Open admitted. Its inputs are written, its results are taken, and End
// ends it. Input side: Write. Output side: Next. One goroutine per side. End may be called
// from any goroutine.
type Run struct {
	Info engine.Info

	core   *Core
	from   *admission.Caller
	id     tensor.ID
	model  string
	began  time.Time
	ctx    context.Context
	cancel context.CancelCauseFunc
	undo   []func()
	over   func(closed error)
	order  []int // for each input port of the model, the index of its input in the Request
	run    engine.Run

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

// Open admits a call and opens its run, waiting for memory as long as a session's call
// does. The run ends when ctx, the timeout or the core does. End must follow. An error is a
// *RefusedError, and the call has then been counted as ended.
func (c *Core) Open(ctx context.Context, from *admission.Caller, q Request) (*Run, error) {
	r, err := c.admit(ctx, from, q, nil)
	if err != nil {
		return nil, err
	}
	r.left = make([]int64, len(r.order))
	for i, in := range q.Inputs {
		n, _ := in.Desc.Bytes() // checked
		r.missing += n
		r.left[slices.Index(r.order, i)] = n
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
func (c *Core) admit(ctx context.Context, from *admission.Caller, q Request, bad error) (*Run, error) {
	if err := c.Begin(); err != nil {
		return nil, err
	}
	if err := c.Enter(admission.Calls, from); err != nil {
		c.End()
		return nil, err
	}
	c.callsUnary.Add(1)
	if q.ID.IsZero() {
		q.ID = tensor.NewID()
	}
	r := &Run{core: c, from: from, id: q.ID, model: q.Model, began: time.Now()}
	if q.Timeout > 0 {
		timed, stop := context.WithTimeout(ctx, q.Timeout)
		ctx, r.undo = timed, append(r.undo, stop)
	}
	r.ctx, r.cancel = context.WithCancelCause(ctx)
	unhook := context.AfterFunc(c.ctx, func() { r.cancel(ErrShutdown) })
	r.undo = append(r.undo, func() { unhook() }, func() { r.cancel(nil) })
	if bad == nil {
		bad = r.open(q)
	}
	if bad != nil {
		return nil, r.end(bad, nil)
	}
	return r, nil
}

func (r *Run) open(q Request) (err error) {
	if q.Model == "" {
		return fmt.Errorf("%w: the model's name is empty", errBinding)
	}
	if problem := cmp.Or(frame.CheckName("model", q.Model), frame.CheckEntries("params", q.Params)); problem != "" {
		return fmt.Errorf("%w: %s", errBinding, problem)
	}
	m, over, err := r.core.model(r.ctx, q.Model)
	if err != nil {
		return err
	}
	r.over, r.Info = over, m.Info()
	var inputs []engine.Input
	if r.order, inputs, err = bind(r.Info, q.Inputs); err != nil {
		return err
	}
	r.run, err = r.core.run(r.ctx, r.cancel, m, engine.Call{ID: r.id, Principal: r.from.Principal(), Inputs: inputs, Params: q.Params, Lifetime: q.Lifetime})
	return err
}

// Write copies data to the next bytes of an input, given by its index in the Request. It
// waits for memory. If a model has several inputs of rows, they must be written alternately
// or from goroutines of their own. After End the error is engine.ErrClosed.
func (r *Run) Write(ctx context.Context, input int, data []byte) error {
	port := slices.Index(r.order, input)
	if over := r.take(port, len(data)); over > 0 { // before its last rows are computed
		return fmt.Errorf("%w: input %d has %d bytes more than its desc", errBinding, input, over)
	}
	for {
		n, missing, err := r.write(port, data)
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

// take takes n bytes of an input from those that are missing, or returns how many of them are
// too many.
func (r *Run) take(port, n int) (over int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if port < 0 || r.ended { // which write says
		return 0
	}
	if over = int64(n) - r.left[port]; over <= 0 {
		r.left[port] -= int64(n)
	}
	return over
}

// write copies to the first block with room for the port, returns full blocks to the run,
// and reports how many bytes of all inputs are still missing.
func (r *Run) write(port int, data []byte) (n int, missing int64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return 0, 0, engine.ErrClosed
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
// Only the first call counts. All results must have been released. End returns the
// *RefusedError for the caller, which is why the run was cancelled, if it was, or else err.
func (r *Run) End(err error) error {
	r.mu.Lock()
	again := r.ended
	r.ended = true
	r.mu.Unlock()
	if again {
		return err
	}
	r.cancel(err) // wakes those who wait for memory or results
	return r.end(err, r.run.Close())
}

// end counts a call that has ended. lost is what the Close of its run returned, if it had
// one.
func (r *Run) end(err, lost error) error {
	if cause := context.Cause(r.ctx); err != nil && cause != nil { // the cause outranks what it caused
		err = cause
	}
	if r.over != nil {
		r.over(lost)
	}
	for _, undo := range r.undo {
		undo()
	}
	defer r.core.End()
	defer r.core.Leave(admission.Calls, r.from)
	if err == nil {
		r.core.callEnded(r.model, frame.OK, time.Since(r.began))
		return nil
	}
	why := ExplainCall(err)
	if why.Secret {
		why.Text = fmt.Sprintf("%s (call %s)", why.Text, r.id) // a caller without a session has no other way to learn it
		r.core.Failures.Add(failures.Failure{At: time.Now(), Call: r.id, Principal: r.core.PrincipalOf(r.ctx), Model: r.model, Code: why.Code}, err)
	}
	r.core.callEnded(r.model, why.Code, time.Since(r.began))
	return why
}

// Tensor is a tensor in memory at a port of a model.
type Tensor struct {
	Port string
	tensor.Tensor
}

// Compute runs a model on tensors in memory, instead of q.Inputs, and returns copies of its
// outputs. It borrows in. Inputs and outputs may take up to most bytes in each direction;
// take is asked before each output is made. An error is a *RefusedError.
func (c *Core) Compute(ctx context.Context, from *admission.Caller, q Request, in []Tensor, most int64, take func(bytes int64) error) ([]Tensor, engine.Stats, error) {
	inputs, bad := offered(in, most)
	q.Inputs = inputs
	r, err := c.admit(ctx, from, q, bad)
	if err != nil {
		return nil, engine.Stats{}, err
	}
	ordered := make([]tensor.Tensor, len(in))
	for port, i := range r.order {
		ordered[port] = in[i].Tensor
	}
	left := most
	results, st, err := engine.Collect(r.ctx, r.Info, r.run, ordered, func(bytes int64) error {
		if left -= bytes; left < 0 {
			return fmt.Errorf("%w: the outputs have more than %d bytes; a session has no such limit", tensor.ErrTooLarge, most)
		}
		return take(bytes)
	})
	var lost error
	if errors.Is(err, engine.ErrLost) {
		lost = err
	}
	out := make([]Tensor, len(results))
	for i, t := range results {
		out[i] = Tensor{r.Info.Outputs[i].Name, t}
	}
	return out, st, r.end(err, lost)
}

// offered returns the model's inputs for tensors in memory.
func offered(in []Tensor, most int64) ([]engine.Input, error) {
	inputs := make([]engine.Input, len(in))
	left := most
	for i, t := range in {
		if _, err := tensor.New(t.Desc, t.Data); err != nil {
			return nil, fmt.Errorf("%w: input %q: %w", errBinding, t.Port, err)
		}
		if left -= int64(len(t.Data)); left < 0 {
			return nil, fmt.Errorf("%w: the inputs have more than %d bytes; a session has no such limit", tensor.ErrTooLarge, most)
		}
		inputs[i] = engine.Input{Port: t.Port, Desc: t.Desc, ChunkBytes: tensor.ChunkFor(t.Desc, min(most, engine.ChunkBytes))}
	}
	return inputs, nil
}

// run opens a run. If that has to wait for memory for too long, it calls cancel, which must
// cancel ctx.
func (c *Core) run(ctx context.Context, cancel context.CancelCauseFunc, m engine.Model, call engine.Call) (_ engine.Run, err error) {
	patience := time.AfterFunc(c.MemoryWait, func() {
		cancel(fmt.Errorf("%w: waited %v; try again later", errMemory, c.MemoryWait))
	})
	defer patience.Stop()
	var bytes int64
	for _, in := range call.Inputs {
		n, _ := in.Desc.Bytes() // checked
		bytes += n
	}
	call.Principal = c.small(call.Principal, bytes)
	defer engine.Recovered(m.Info().Name, &err)
	return m.Open(ctx, call)
}

// bind puts inputs in the order of a model's ports, and returns the index of each among in.
func bind(info engine.Info, in []engine.Input) (order []int, inputs []engine.Input, err error) {
	if len(in) != len(info.Inputs) {
		return nil, nil, unbound(info, in)
	}
	order, inputs = make([]int, len(in)), make([]engine.Input, len(in))
	for p, port := range info.Inputs {
		i := slices.IndexFunc(in, func(i engine.Input) bool { return i.Port == port.Name || i.Port == "" && len(in) == 1 })
		if i < 0 {
			return nil, nil, unbound(info, in)
		}
		order[p], inputs[p] = i, in[i]
		inputs[p].Port = port.Name
	}
	return order, inputs, nil
}

// unbound says which inputs a model takes and which a call has.
func unbound(info engine.Info, in []engine.Input) error {
	takes, has := make([]string, len(info.Inputs)), make([]string, len(in))
	for p, port := range info.Inputs {
		takes[p] = port.Name
	}
	for i := range in {
		has[i] = in[i].Port
	}
	return fmt.Errorf("%w: %q takes inputs %q, the call has %q", errBinding, info.Name, takes, has)
}
