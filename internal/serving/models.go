package serving

import (
	"errors"
	"sync"

	"github.com/tensorferry/tensorferry/engine"
)

// Health is that of a model.
type Health uint8

// The healths of a model.
const (
	// Serving: it runs.
	Serving Health = iota
	// Lost: a run of it did not end and holds memory and a worker. Only another model
	// in its place serves.
	Lost
	// Gone: it is not in the registry any more.
	Gone
)

// models follows the health of the models of a registry.
type models struct {
	told func(name string, h Health)

	mu      sync.Mutex        // guards all below
	numbers map[string]uint64 // of each model, to tell it from the one that takes its place
	last    uint64
}

// watch follows the registry.
func (h *models) watch(name string, here bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !here {
		delete(h.numbers, name)
		h.told(name, Gone)
		return
	}
	h.last++
	h.numbers[name] = h.last
	h.told(name, Serving)
}

func (h *models) number(name string) uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.numbers[name]
}

// lost notes that a run of a model did not end, unless the model is gone already.
func (h *models) lost(name string, number uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.numbers[name] == number {
		h.told(name, Lost)
	}
}

// model finds a model for one run. over is called once, after the run's Close and
// with what that returned.
func (c *Core) model(name string) (m engine.Model, over func(closed error), err error) {
	number := c.models.number(name) // before Lookup, or a loss is blamed on the next model
	m, unuse, err := c.cfg.Models.Lookup(name)
	if err != nil {
		return nil, nil, err
	}
	return m, func(closed error) {
		defer unuse()
		if closed == nil {
			return
		}
		c.runsAbandoned.Add(1)
		if errors.Is(closed, engine.ErrLost) {
			c.models.lost(name, number)
		}
	}, nil
}
