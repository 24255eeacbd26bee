package worker

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/internal/link"
)

// Companions are models of the same process, which share what it keeps between calls: those
// of a module that trains have its gradients, its optimizer and the graphs of forward passes.

// Companions returns the models that the process has beside Model, named NAME/part.
func (h *Host) Companions() []engine.Model { return h.companions }

// trainingGauges are what a process with companions says that it keeps, by its own names.
var trainingGauges = []struct{ said, name, meaning string }{
	{"graphs", "training_graphs", "graphs of forward passes that are kept for their backward passes"},
	{"bytes", "training_graph_bytes", "memory that they have"},
	{"used", "training_graphs_used", "graphs that a backward pass has used"},
	{"evicted", "training_graphs_evicted", "graphs that were dropped for others"},
	{"expired", "training_graphs_expired", "graphs that were dropped for their age, or after a step"},
	{"missed", "training_graphs_missed", "backward passes whose graph was gone"},
	{"step", "training_step", "steps that the optimizer has taken"},
	{"lease", "training_lease", "1 while a client trains"},
}

// kept is what a process says that it keeps between calls.
type kept struct {
	Bytes  int64              `json:"kept"` // all of it
	Most   int64              `json:"most"` // what one call has left
	Gauges map[string]float64 `json:"gauges"`
}

// keep charges what a process keeps between calls to the budget of inputs, as it says. Nil is
// a process that is gone.
func (h *Host) keep(text []byte) error {
	var k kept
	if text != nil {
		if err := json.Unmarshal(text, &k); err != nil {
			return fmt.Errorf("%w: kept: %w", link.ErrMessage, err)
		}
	}
	k.Bytes = min(max(0, k.Bytes), h.cfg.MemoryBytes) // it is bounded by half of that
	k.Most = min(max(0, k.Most), h.cfg.MemoryBytes/keptShare)
	h.mu.Lock()
	before := h.kept
	h.kept = k
	h.mu.Unlock()
	switch more := k.Bytes - before.Bytes; {
	case more > 0:
		h.budget.Hold(nil, more)
	case more < 0:
		h.budget.Release(nil, -more)
	}
	return nil
}

// session returns the number of the session, or what stands for one, that a call belongs to. The
// processes are told when it has ended. Zero is none.
func (h *Host) session(life context.Context) uint64 {
	if life == nil || life.Done() == nil || len(h.companions) == 0 {
		return 0
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	number, known := h.sessions[life.Done()]
	if !known {
		h.lastSession++
		number = h.lastSession
		h.sessions[life.Done()] = number
		context.AfterFunc(life, func() { h.leaveSession(life) })
	}
	return number
}

func (h *Host) leaveSession(life context.Context) {
	h.mu.Lock()
	defer h.mu.Unlock()
	gone := &link.Gone{Head: link.Head{ID: h.sessions[life.Done()]}}
	delete(h.sessions, life.Done())
	for g := range h.guests {
		g.tells = append(g.tells, gone)
	}
	h.more.Broadcast()
}
