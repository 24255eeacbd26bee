package splitlearn

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

// training keeps the passes of all clients for ComputeBackward. Their graphs are the models', each
// of which lets one client train: for them the service is one for all of its own. It takes a
// lease when a model asks for it, and gives it up when no pass is left.
type training struct {
	models *server.Models
	token  string // of all leases

	mu     sync.Mutex          // guards all below
	passes []*pass             // the oldest first
	gone   map[string][]string // graphs that a model may still keep, and nobody needs
	leases map[string]*lease
}

// pass is a run in training mode that waits for its gradient. Only its connection may ask for that:
// clients choose names as they like, and two that choose the same must not get each other's.
type pass struct {
	name, model string
	from        context.Context // ends with the connection
	call        tensor.ID
	born        time.Time
	busy        bool // its forward or backward run has not ended
}

// nameOf returns the name of a pass of a client, or of all whom nobody identifies.
func nameOf(ctx context.Context, id string) string { return server.Principal(ctx) + "\x00" + id }

// lease is that of a model that trains.
type lease struct {
	use  sync.RWMutex // for reading by those who need it
	idle *time.Timer
}

// use keeps the lease of a model from being given up until done.
func (t *training) use(model string) (done func()) {
	t.mu.Lock()
	l := t.leases[model]
	if l == nil { // as many as there are models
		l = new(lease)
		l.idle = time.AfterFunc(leaseIdle, func() { t.giveUp(l, model) })
		t.leases[model] = l
	}
	t.mu.Unlock()
	l.use.RLock() // for leaseWait at most
	return func() {
		l.use.RUnlock()
		l.idle.Reset(leaseIdle)
	}
}

// giveUp gives a lease up, or looks again later if it is needed.
func (t *training) giveUp(l *lease, model string) {
	if !l.use.TryLock() { // those who have it set the timer again
		return
	}
	defer l.use.Unlock()
	wait := time.Duration(0)
	t.mu.Lock()
	t.sweep()
	for _, run := range t.passes {
		if run.model == model {
			wait = max(wait, time.Until(run.born.Add(passAge)))
		}
	}
	t.mu.Unlock()
	if wait <= 0 {
		ctx, cancel := context.WithTimeout(t.models.Context(), leaseWait)
		defer cancel()
		_, err := t.run(ctx, model+"/lease", tensor.ID{}, nil, nil, map[string]string{"token": t.token, "end": "true"})
		r, later := errors.AsType[*terms.RefusedError](err)
		later = later && r.RetryMillis > 0 || ctx.Err() == context.DeadlineExceeded
		if !later || t.models.Context().Err() != nil { // it is given up, or lost
			t.mu.Lock()
			delete(t.gone, model)
			t.mu.Unlock()
			return
		}
		wait = leaseIdle
	}
	l.idle.Reset(wait)
}

// run runs a model beside the one that trains, on tensors at ports.
func (t *training) run(ctx context.Context, model string, id tensor.ID, ports []engine.Port, in []tensor.Tensor, params map[string]string) ([]tensor.Tensor, error) {
	call := engine.Call{ID: id, Inputs: inputsOf(ports), Params: params, Lifetime: t.models.Context()}
	out, _, _, err := t.models.Compute(ctx, model, call, in, tensorBytes)
	return out, err
}

// forward runs a pass and keeps it. It borrows in; the outputs are copies.
func (t *training) forward(ctx context.Context, of *ports, id string, in []tensor.Tensor) (out []tensor.Tensor, err error) {
	model := of.Name
	defer t.use(model)()
	p := &pass{name: nameOf(ctx, id), model: model, from: t.models.Connection(ctx), call: tensor.NewID(), born: time.Now(), busy: true}
	release, free := t.enter(p)
	if !free {
		return nil, frame.Errorf(frame.AlreadyExists, "forward_id %q: a pass of this name waits for its gradient; use another", id)
	}
	defer func() { t.settle(p, err == nil) }()
	params := map[string]string{"lease": t.token, "eval": "true", "release": release}
	out, err = t.run(ctx, model+"/train", p.call, of.Inputs, in, params)
	if refused(err) != nil { // the lease was given up, or lost with the model's process; if not, it says so again
		_, err = t.run(ctx, model+"/lease", tensor.ID{}, nil, nil, map[string]string{"token": t.token})
		if r := refused(err); r != nil {
			return nil, frame.Errorf(frame.PermissionDenied, "the model trains with another client: %s", r.Text)
		}
		if err == nil {
			out, err = t.run(ctx, model+"/train", p.call, of.Inputs, in, params)
		}
	}
	if ctx.Err() != nil { // the client is not told, and comes again with the same name
		err = cmp.Or(err, context.Cause(ctx))
	}
	return out, err
}

// enter adds a pass whose name is free, instead of the oldest if there are too many: of the client
// that has most, who may have many connections, and of its connection that has most. It returns what
// its model is to release.
func (t *training) enter(p *pass) (release string, free bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sweep()
	if slices.ContainsFunc(t.passes, func(q *pass) bool { return q.name == p.name }) {
		return "", false
	}
	t.passes = append(t.passes, p)
	if len(t.passes) > passes {
		of := heaviest(t.passes, func(q *pass) string { return q.name[:strings.IndexByte(q.name, 0)] })
		of = heaviest(of, func(q *pass) context.Context { return q.from })
		t.drop(slices.Index(t.passes, of[0]))
	}
	graphs := t.gone[p.model]
	n := min(len(graphs), passes) // a param has room for
	t.gone[p.model] = graphs[n:]
	return strings.Join(graphs[:n], ","), true
}

// heaviest returns the passes of those who have most of them.
func heaviest[T comparable](all []*pass, owner func(*pass) T) []*pass {
	of, most := make(map[T]int), 0
	for _, p := range all {
		of[owner(p)]++
		most = max(most, of[owner(p)])
	}
	return slices.DeleteFunc(slices.Clone(all), func(p *pass) bool { return of[owner(p)] < most })
}

// sweep drops the passes that are too old, or whose connections have ended.
func (t *training) sweep() {
	for i, p := range slices.Backward(t.passes) {
		if p.from.Err() != nil || !p.busy && time.Since(p.born) >= passAge {
			t.drop(i)
		}
	}
}

// drop drops a pass. The graph of one that is busy may be in use, or not made yet: settle sees to it.
func (t *training) drop(i int) {
	p := t.passes[i]
	t.passes = slices.Delete(t.passes, i, i+1)
	if !p.busy {
		t.gone[p.model] = append(t.gone[p.model], p.call.String())
	}
}

// settle ends a run of a pass, which is kept unless it was dropped meanwhile. Of one that is not,
// the model may have the graph or not.
func (t *training) settle(p *pass, keep bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := slices.Index(t.passes, p)
	p.busy, p.born = false, time.Now()
	switch {
	case i < 0:
		t.gone[p.model] = append(t.gone[p.model], p.call.String())
	case !keep:
		t.drop(i)
	}
}

// take returns a pass of a model, or of any if that is empty, once and to its connection. settle must
// follow.
func (t *training) take(from context.Context, name, model string) (p *pass, found bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sweep()
	i := slices.IndexFunc(t.passes, func(p *pass) bool {
		return p.name == name && p.from == from && (model == "" || p.model == model) && !p.busy
	})
	if i < 0 {
		return new(pass), false
	}
	t.passes[i].busy = true
	return t.passes[i], true
}

// backward returns the gradient of the input of a pass; what it would add to those of the weights
// nobody would apply. It borrows the gradient of the result.
func (t *training) backward(ctx context.Context, p *ports, run *pass, gradient tensor.Tensor) (tensor.Tensor, error) {
	defer t.use(run.model)()
	in, unused := make([]tensor.Tensor, len(p.Outputs)), []string(nil)
	for i, port := range p.Outputs {
		in[i] = gradient
		if i != p.result {
			in[i] = tensor.Tensor{Desc: tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{0}}}
			unused = append(unused, port.Name)
		}
	}
	out, err := t.run(ctx, run.model+"/backward", tensor.ID{}, p.Outputs, in, map[string]string{
		"lease": t.token, "forward": run.call.String(), "alone": "true", "unused": strings.Join(unused, ","),
	})
	if err != nil {
		return gradient, err
	}
	return out[p.data], nil
}
