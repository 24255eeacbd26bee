package engine

import (
	"context"
	"fmt"
	"sync"
)

// model is a model in host memory, whatever its blocks are computed by.
type model struct {
	host     *Host
	info     Info
	bind     func(Call) (bound, error)
	teardown func() error
}

func newModel(h *Host, info Info, bind func(Call) (bound, error), setup func() error, teardown func()) (m *model, err error) {
	if err := info.validate(); err != nil {
		return nil, err
	}
	if info.Device == "" {
		info.Device = "cpu"
	}
	if setup != nil {
		if err := guard(info.Name, setup); err != nil {
			return nil, failed(info.Name, fmt.Errorf("set-up: %w", err))
		}
	}
	return &model{h, info, bind, sync.OnceValue(func() error {
		if teardown == nil {
			return nil
		}
		return guard(info.Name, func() error { teardown(); return nil })
	})}, nil
}

// guard runs a model's own code, a panic of which becomes an error.
func guard(name string, f func() error) (err error) {
	defer recovered(name, &err)
	return f()
}

// Info implements Model. Its slices are shared, read-only.
func (m *model) Info() Info { return m.info }

// Open implements Model.
func (m *model) Open(ctx context.Context, c Call) (Run, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	p, b, err := m.plan(c)
	if err != nil {
		return nil, err
	}
	r, err := start(ctx, m.host, m.info, c, p, b)
	if err != nil {
		return nil, err
	}
	return r, nil
}

// plan checks a call and lays it out, without taking any memory.
func (m *model) plan(c Call) (p plan, b bound, err error) {
	rows, err := m.info.Check(c)
	if err != nil {
		return plan{}, bound{}, err
	}
	err = guard(m.info.Name, func() error {
		b, err = m.bind(c)
		return err
	})
	if err != nil {
		return plan{}, bound{}, refused(m.info.Name, err)
	}
	p, err = newPlan(m.info, c, rows, b)
	return p, b, err
}

// Close runs the model's Teardown, once. Nothing may be open any more.
func (m *model) Close() error { return m.teardown() }
