package worker

import (
	"context"
	"encoding/json"
	"fmt"
	"sync/atomic"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/slab"
)

// state is that of a sequence: one run of one guest, which all calls of the sequence share.
type state struct {
	guest  *guest
	run    uint64
	holder *slab.Principal
	json   []byte       // what the guest is told with its first block
	bytes  atomic.Int64 // as the guest said last

	// Guarded by the host's mu.
	rows int64 // that the guest was given
	over error // why it is gone
}

// begin implements engine.Sequencer: the sequence stays with a process that has the fewest.
func (h *Host) begin(_ context.Context, q engine.Sequence) (engine.State, error) {
	about, _ := json.Marshal(callJSON{Call: q.ID.String(), Params: q.Params, Inputs: []inputJSON{}, MaxRows: q.MaxRows}) // texts do not fail
	h.mu.Lock()
	defer h.mu.Unlock()
	s := &state{run: h.runIDs.Add(1), holder: q.Principal, json: about}
	for g := range h.guests {
		if s.guest == nil || len(g.states) < len(s.guest.states) {
			s.guest = g
		}
	}
	if s.guest == nil {
		return nil, fmt.Errorf("%w: no process of model %q is ready", engine.ErrUnavailable, h.cfg.Name)
	}
	s.guest.states[s] = struct{}{}
	return s, nil
}

// step makes p the program of the next call.
func (h *Host) step(s engine.State, p *program) error {
	own, ok := s.(*state)
	if !ok || own.guest.host != h {
		return fmt.Errorf("%w: it is that of another model", engine.ErrStateLost)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if own.over != nil {
		return fmt.Errorf("%w: %w", engine.ErrStateLost, own.over)
	}
	p.state, p.owner, p.run, p.before, p.json = own, own.guest, own.run, own.rows, own.json
	return nil
}

// Rows implements engine.State.
func (s *state) Rows(c engine.Call) (int64, error) { return s.guest.host.info.Check(c) }

// Bytes implements engine.State.
func (s *state) Bytes() int64 { return s.bytes.Load() }

// Close implements engine.State.
func (s *state) Close() {
	g := s.guest
	g.host.mu.Lock()
	defer g.host.mu.Unlock()
	s.end(engine.ErrClosed)
	g.forget(s.run)
}

// end ends the state; mu is held.
func (s *state) end(why error) {
	if s.over == nil {
		s.over = why
		delete(s.guest.states, s)
		s.charge(0)
	}
}

// grew notes the bytes that a guest says the state has. An error says that it may not have so many.
func (s *state) grew(told []byte) error {
	var said struct{ State int64 }
	if err := json.Unmarshal(told, &said); err != nil {
		return fmt.Errorf("its worker does not say how large the state is: %w", err)
	}
	h := s.guest.host
	h.mu.Lock()
	defer h.mu.Unlock()
	left, what := h.left()+s.bytes.Load(), slab.ErrMemory
	if said.State > left {
		if said.State > h.cfg.MemoryBytes/keptShare {
			what = slab.ErrBudget
		}
		return fmt.Errorf("%w: the state of the sequence has %d bytes; with what else model %q keeps it may have %d; keep less in call.state", what, said.State, h.cfg.Name, left)
	}
	if s.over == nil {
		s.charge(max(0, said.State))
	}
	return nil
}

// charge has the state take so many bytes; mu is held.
func (s *state) charge(bytes int64) {
	more := bytes - s.bytes.Swap(bytes)
	s.guest.host.charge(s.holder, more)
	s.guest.host.stateBytes += more
}

// charge charges more bytes, or fewer, to the budget of inputs.
func (h *Host) charge(holder *slab.Principal, more int64) {
	if more > 0 {
		h.budget.Hold(holder, more)
	} else {
		h.budget.Release(holder, -more)
	}
}

// left is how many bytes more may be kept; mu is held.
func (h *Host) left() int64 {
	return max(0, h.cfg.MemoryBytes/keptShare-h.kept.Bytes-h.stateBytes)
}
