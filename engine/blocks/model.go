package blocks

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/tensor"
)

// Model is what an engine says about one of its models.
type Model struct {
	Info engine.Info
	// Bind ties the model to a checked call. Its error refuses that (wraps engine.ErrInput).
	Bind func(engine.Call) (Bound, error)
	// Begin, if set, is engine.Sequencer's.
	Begin func(context.Context, engine.Sequence) (engine.State, error)
	// Setup, if set, runs once before the model is there. Teardown, if set, runs
	// once, when the model is closed: by a Registry after its last use.
	Setup    func() error
	Teardown func()
	// Gauges, if set, is what there is to measure: as engine.Gauger.
	Gauges func() []engine.Gauge
	// Quick: results are InPlace, and a block of 64 KiB takes a few microseconds, of this program's
	// own code. Small calls need no run then, as engine.Immediate says, if the Device is a Helper.
	Quick bool
}

// Bound is a model tied to one call: what comes out, and how a block is computed.
type Bound struct {
	// Outs describe the outputs. Nil, where Results is Given and the model has inputs or
	// no rows: they are known when the first block gives them.
	Outs    []tensor.Desc
	Results Results
	Program any // what to compute: the device knows its type

	MostRows int64 // in a block, unless so few make too many blocks of a chunk; 0: no bound

	Memory []int64 // bytes that count in the budget beside all blocks, each
}

// Results say where the results of a block lie.
type Results uint8

// Where results may lie.
const (
	Own     Results = iota // in memory of their own, which the run has for them
	InPlace                // where the only split input of the block does, in rows of as many bytes
	Given                  // where the device says (Work.Give), which bounds that memory; in the input they keep its memory until they are released
)

// model implements engine.Model.
type model struct {
	Model
	engine *Engine
	close  func() error
}

// Model makes m ready to run on e: it validates its Info (errors wrap
// engine.ErrInfo) and runs Setup (errors wrap engine.ErrModel).
func (e *Engine) Model(m Model) (engine.Model, error) {
	if err := m.Info.Validate(); err != nil {
		return nil, err
	}
	if m.Info.Device == "" {
		m.Info.Device = e.cfg.Name
	}
	if m.Setup != nil {
		if err := guard(m.Info.Name, m.Setup); err != nil {
			return nil, failed(m.Info.Name, "set-up: ", err)
		}
	}
	made := &model{m, e, sync.OnceValue(func() error {
		if m.Teardown == nil {
			return nil
		}
		return guard(m.Info.Name, func() error { m.Teardown(); return nil })
	})}
	if _, helps := e.cfg.Device.(Helper); helps && m.Quick {
		return quick{made}, nil
	}
	return made, nil
}

// guard runs a model's own code, a panic of which becomes an error.
func guard(name string, f func() error) (err error) {
	defer engine.Recovered(name, &err)
	return f()
}

// failed wraps what a model's own code, or its device, failed with, and where.
func failed(name, where string, err error) error {
	for _, known := range []error{engine.ErrModel, engine.ErrUnavailable, engine.ErrClosed, engine.ErrPrecondition, engine.ErrStateLost, engine.ErrParam} {
		if errors.Is(err, known) {
			return err
		}
	}
	return fmt.Errorf("%w: %q: %s%w", engine.ErrModel, name, where, err)
}

// Info implements engine.Model. Its slices are shared, read-only.
func (m *model) Info() engine.Info { return m.Model.Info }

// Close runs Teardown, once. Nothing may be open any more.
func (m *model) Close() error { return m.close() }

// WatchHealth implements engine.HealthWatcher: a model is as well as its device.
func (m *model) WatchHealth(told func(error)) (stop func()) { return m.engine.watch(told) }

// Gauges implements engine.Gauger.
func (m *model) Gauges() []engine.Gauge {
	if m.Model.Gauges == nil {
		return nil
	}
	return m.Model.Gauges()
}

// Begin implements engine.Sequencer.
func (m *model) Begin(ctx context.Context, q engine.Sequence) (s engine.State, err error) {
	if m.Model.Begin == nil {
		return nil, nil
	}
	err = guard(m.Model.Info.Name, func() error {
		s, err = m.Model.Begin(ctx, q)
		return err
	})
	return s, err
}

// Open implements engine.Model.
func (m *model) Open(ctx context.Context, c engine.Call) (engine.Run, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	p, b, err := m.plan(c)
	if err != nil {
		return nil, err
	}
	return m.start(ctx, c, p, b)
}

// quick is a model that is Quick, on a Helper.
type quick struct{ *model }

// AtOnce implements engine.Immediate.
func (m quick) AtOnce(c engine.Call, data []byte) bool {
	if len(data) == 0 || len(data) > engine.AtOnceBytes {
		return false
	}
	rows, err := m.Model.Info.Check(c)
	if err != nil {
		return false
	}
	b, err := m.Bind(c)
	one := [][]byte{data}
	return err == nil && m.engine.cfg.Device.(Helper).Compute(b.Program, RowBlock{Rows: rows, In: one, Out: one, Descs: b.Outs, OutDescs: b.Outs, Params: c.Params})
}

// plan checks a call and lays it out, without taking any memory.
func (m *model) plan(c engine.Call) (p plan, b Bound, err error) {
	info := m.Model.Info.Of(c.Inputs)
	rows, err := info.Check(c)
	if err != nil {
		return plan{}, Bound{}, err
	}
	err = guard(info.Name, func() error {
		b, err = m.Bind(c)
		return err
	})
	switch {
	case err == nil:
		p, err = newPlan(info, c, rows, b)
	case !errors.Is(err, engine.ErrInput) && !errors.Is(err, engine.ErrParam) && !errors.Is(err, engine.ErrStateLost) && !errors.Is(err, engine.ErrModel):
		err = fmt.Errorf("%w: model %q: %w", engine.ErrInput, info.Name, err)
	}
	return p, b, err
}
