package serving

import (
	"context"
	"errors"
	"sync"

	"github.com/tensorferry/tensorferry/engine"
)

// Health is the health of a model.
type Health uint8

// The values of Health.
const (
	// Serving means that the model runs.
	Serving Health = iota
	// NotServing means that the model says that it cannot run, or that it lost a run, which
	// holds memory and a worker until the run ends or another model takes its place.
	NotServing
	// Gone means that the model is no longer in the registry.
	Gone
)

// models tracks the models of a registry.
type models struct {
	told func(name string, h Health)

	mu  sync.Mutex // guards all below; taken after the lock of a model's engine
	all map[string]*modelState
}

// modelState is the state of one model.
type modelState struct {
	stop func() // stops watching its health
	lost int    // lost runs that have not ended
	ill  error  // why the model says that it cannot run
}

// watch follows the registry.
func (ms *models) watch(name string, m engine.Model) {
	s := &modelState{stop: func() {}}
	ms.mu.Lock()
	old := ms.all[name]
	if m == nil {
		delete(ms.all, name)
		ms.told(name, Gone)
	} else {
		ms.all[name] = s
		ms.told(name, Serving)
	}
	ms.mu.Unlock()
	if old != nil {
		old.stop()
	}
	if w, ok := engine.As[engine.HealthWatcher](m); ok {
		s.stop = w.WatchHealth(func(err error) {
			ms.change(name, s, func() { s.ill = err })
		})
	}
}

// change changes the state of a model, unless the model has been removed.
func (ms *models) change(name string, s *modelState, change func()) {
	ms.mu.Lock()
	defer ms.mu.Unlock()
	if s == nil || ms.all[name] != s {
		return
	}
	change()
	health := Serving
	if s.unavailable() != "" {
		health = NotServing
	}
	ms.told(name, health)
}

// unavailable returns why a model cannot run, or "" if it can.
func (s *modelState) unavailable() string {
	switch {
	case s == nil:
		return ""
	case s.ill != nil:
		return s.ill.Error()
	case s.lost > 0:
		return "one of its runs did not end; it serves again when that run ends or the model is replaced"
	}
	return ""
}

// model looks up a model for one run, if the sender of ctx's RPC may run it. over must be
// called once, after the run's Close, with the error that Close returned.
func (c *Core) model(ctx context.Context, name string) (m engine.Model, over func(closed error), err error) {
	if err := c.May(ctx, "compute", name); err != nil {
		return nil, nil, err
	}
	c.models.mu.Lock()
	state := c.models.all[name] // before Lookup, or a lost run might be blamed on the next model
	c.models.mu.Unlock()
	m, unuse, err := c.Models.Lookup(name)
	if err != nil {
		return nil, nil, err
	}
	return m, func(closed error) {
		if closed != nil {
			c.runsAbandoned.Add(1)
		}
		if errors.Is(closed, engine.ErrLost) {
			c.models.change(name, state, func() { state.lost++ })
		}
		lost, ok := errors.AsType[*engine.LostError](closed)
		if !ok {
			unuse()
			return
		}
		go func() { // ends with the model's code, or with the core
			defer unuse()
			select {
			case <-lost.Ended:
				c.models.change(name, state, func() { state.lost-- })
			case <-c.ctx.Done():
			}
		}()
	}, nil
}

// ModelState is the current state of a model.
type ModelState struct {
	Name        string
	Unavailable string         // why it cannot run; empty if it can
	Gauges      []engine.Gauge // at most modelGauges
}

// ModelStates returns the states of the models, in the order of their names.
func (c *Core) ModelStates() (all []ModelState) {
	for _, i := range c.Models.Infos() {
		c.models.mu.Lock()
		s := ModelState{Name: i.Name, Unavailable: c.models.all[i.Name].unavailable()}
		c.models.mu.Unlock()
		if m, release, err := c.Models.Lookup(i.Name); err == nil {
			if g, ok := engine.As[engine.Gauger](m); ok {
				s.Gauges = g.Gauges()
				s.Gauges = s.Gauges[:min(len(s.Gauges), modelGauges)]
			}
			release()
		}
		all = append(all, s)
	}
	return all
}
