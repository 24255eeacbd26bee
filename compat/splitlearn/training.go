package splitlearn

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

// training keeps the passes of all clients for ComputeBackward. Their graphs are the models', each
// of which lets one client train: for them the service is one for all of its own. It takes a
// lease when a model asks for it, and gives it up when no pass is left.
type training struct {
	models *server.Models
	token  string // of all leases

	mu     sync.Mutex // guards all below
	passes []pass     // the oldest first
	leases map[string]*lease
}

// pass is a run in training mode that waits for its gradient.
type pass struct {
	name, model string
	call        tensor.ID
	born        time.Time
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
	for _, run := range t.passes {
		if run.model == model {
			wait = max(wait, time.Until(run.born.Add(passAge)))
		}
	}
	t.mu.Unlock()
	if wait <= 0 {
		ctx, cancel := context.WithTimeout(t.models.Context(), leaseWait)
		defer cancel()
		_, err := t.run(ctx, model+"/lease", tensor.ID{}, nil, map[string]string{"token": t.token, "end": "true"})
		r, later := errors.AsType[*server.RefusedError](err)
		later = later && r.RetryMillis > 0 || ctx.Err() == context.DeadlineExceeded
		if !later || t.models.Context().Err() != nil { // it is given up, or lost
			return
		}
		wait = leaseIdle
	}
	l.idle.Reset(wait)
}

// run runs a model beside the one that trains.
func (t *training) run(ctx context.Context, model string, id tensor.ID, in []server.Tensor, params map[string]string) ([]server.Tensor, error) {
	out, _, err := t.models.Compute(ctx, server.Request{Model: model, ID: id, Params: params, Lifetime: t.models.Context()}, in, tensorBytes)
	return out, err
}

// forward runs a pass and keeps it. It borrows in; the outputs are copies.
func (t *training) forward(ctx context.Context, model, name string, in []server.Tensor) ([]server.Tensor, error) {
	defer t.use(model)()
	kept := pass{name: name, model: model, call: tensor.NewID()}
	params := map[string]string{"lease": t.token, "eval": "true", "release": t.makeRoom(name, model)}
	out, err := t.run(ctx, model+"/train", kept.call, in, params)
	if refused(err) != nil { // the lease was given up, or lost with the model's process; if not, it says so again
		_, err = t.run(ctx, model+"/lease", tensor.ID{}, nil, map[string]string{"token": t.token})
		if r := refused(err); r != nil {
			return nil, frame.Errorf(permissionDenied, "the model trains with another client: %s", r.Text)
		}
		if err == nil {
			out, err = t.run(ctx, model+"/train", kept.call, in, params)
		}
	}
	if err != nil {
		return nil, err
	}
	kept.born = time.Now()
	t.keep(kept)
	return out, nil
}

func (t *training) keep(run pass) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.passes = append(t.passes, run)
	t.passes = t.passes[max(0, len(t.passes)-passes):] // others may have come since there was room
}

// makeRoom drops the pass of a name, those that are too old and the oldest beyond the limit. It
// returns those of a model, which keeps their graphs until it is told, or the lease is given up.
func (t *training) makeRoom(name, model string) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var graphs []string
	for i, p := range slices.Backward(t.passes) {
		if p.name == name || time.Since(p.born) >= passAge || i == 0 && len(t.passes) >= passes {
			t.passes = slices.Delete(t.passes, i, i+1)
			if p.model == model {
				graphs = append(graphs, p.call.String())
			}
		}
	}
	return strings.Join(graphs, ",")
}

// take returns a pass of a model, or of any if that is empty, once, if it is kept.
func (t *training) take(name, model string) (run pass, found bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := slices.IndexFunc(t.passes, func(p pass) bool {
		return p.name == name && (model == "" || p.model == model) && time.Since(p.born) < passAge
	})
	if i >= 0 {
		run = t.passes[i]
		t.passes = slices.Delete(t.passes, i, i+1)
	}
	return run, i >= 0
}

// backward returns the gradient of the input of a pass; what it would add to those of the weights
// nobody would apply. It borrows the gradient of the result.
func (t *training) backward(ctx context.Context, p *ports, run pass, id string, gradient tensor.Tensor) (tensor.Tensor, error) {
	defer t.use(run.model)()
	in, unused := make([]server.Tensor, len(p.Outputs)), []string(nil)
	for i, port := range p.Outputs {
		in[i] = server.Tensor{Port: port.Name, Tensor: gradient}
		if i != p.result {
			in[i].Desc, in[i].Data = tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{0}}, nil
			unused = append(unused, port.Name)
		}
	}
	out, err := t.run(ctx, run.model+"/backward", tensor.ID{}, in, map[string]string{
		"lease": t.token, "forward": run.call.String(), "alone": "true", "unused": strings.Join(unused, ","),
	})
	if err == nil {
		return out[p.data].Tensor, nil
	}
	if r, ok := errors.AsType[*server.RefusedError](err); ok && r.RetryMillis > 0 { // which clients do
		t.keep(run)
	} else if refused(err) != nil { // the model had no memory for it, or its process was started anew
		err = noPass(id)
	}
	return gradient, err
}
