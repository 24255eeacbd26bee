package serving

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/internal/failures"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// sequence is a series of calls of a session that share a state of the model. One at a time has
// it: a step. The fields from rows on are guarded by the session's lock.
type sequence struct {
	session *Session
	id      tensor.ID
	name    string // of the model
	model   engine.Model
	over    func(closed error) // of the model
	params  map[string]string
	state   engine.State // nil: the steps are independent
	most    int64        // rows of all steps
	idle    time.Duration
	rest    *time.Timer // ends the sequence when no step comes

	rows int64 // of steps that have ended well
	busy bool  // there is a step
	uses int   // the sequence's own, and one for each step that is not over for the model
	lost error // from the Close of a run
}

// begin begins a sequence, which is all that a call does.
func (c *call) begin(ctx context.Context, part frame.Sequence, params map[string]string) (err error) {
	s, core := c.session, c.session.core
	q := &sequence{session: s, id: part.ID, name: c.model, most: int64(part.MaxRows), params: params, uses: 1}
	if err = core.Enter(admission.Sequences, s.From); err != nil {
		return err
	}
	leave := func() { core.Leave(admission.Sequences, s.From) }
	model, over, err := core.model(ctx, c.model)
	if err != nil {
		leave()
		return err
	}
	q.model, q.over = model, func(closed error) {
		over(closed)
		leave()
	}
	if err = q.open(ctx, c.cancel); err == nil {
		s.Do(func(m *stream.Machine, now stream.Instant) {
			if err = context.Cause(ctx); err == nil && s.sequences[q.id] != nil {
				err = failures.Refusal("INVALID_ARGUMENT", "sequence %s has begun before; choose another id", q.id)
			}
			if err == nil {
				s.sequences[q.id] = q
				m.Finish(c.done(now, now, engine.Info{}, nil, engine.Stats{}))
			}
		})
	}
	if err != nil {
		q.unuse()
		return err
	}
	return nil
}

// open has the model begin the sequence.
func (q *sequence) open(ctx context.Context, cancel context.CancelCauseFunc) (err error) {
	core, info := q.session.core, q.model.Info()
	if info.Rows == 0 || len(info.Inputs) == 0 {
		return fmt.Errorf("%w: model %q takes whole tensors, so it has no sequences; use ordinary calls, or, if it is yours, declare its rows", engine.ErrPrecondition, q.name)
	}
	if err := info.CheckParams(q.params); err != nil {
		return err
	}
	if m, ok := engine.As[engine.Sequencer](q.model); ok {
		defer core.Patience(cancel, core.waited).Stop()
		defer engine.Recovered(info.Name, &err)
		if q.state, err = m.Begin(ctx, engine.Sequence{ID: q.id, Principal: q.session.Holder, Params: q.params, MaxRows: q.most}); err != nil {
			return err
		}
	}
	q.idle = time.Duration(core.Session.WithDefaults().SessionIdle)
	q.rest = time.AfterFunc(q.idle, q.rested)
	return nil
}

// end ends a sequence, if there is one, which is all that a call does.
func (c *call) end(id tensor.ID) {
	var q *sequence
	c.session.Do(func(*stream.Machine, stream.Instant) { q = c.session.sequences[id] })
	if q != nil {
		q.end()
	}
	c.session.Do(func(m *stream.Machine, now stream.Instant) {
		m.Finish(c.done(now, now, engine.Info{}, nil, engine.Stats{}))
	})
}

// step returns the sequence of which a call is a step, and has the state from now on. The
// session is locked. unuse must follow.
func (s *Session) step(id tensor.ID) (*sequence, error) {
	q := s.sequences[id]
	switch {
	case q == nil:
		return nil, failures.Refusal(reason.StateLost, "there is no sequence %s: it has not begun, or has ended, as each does when a step fails, or none comes for as long as a session may be idle", id)
	case q.busy:
		return nil, failures.Refusal(reason.ModelState, "sequence %s: a step is under way; wait for its result", id)
	}
	q.busy = true
	q.uses++
	return q, nil
}

// prepare completes the call of a step, whose inputs are in the order of the model's ports, and
// returns how many rows it brings.
func (q *sequence) prepare(ctx context.Context, call *engine.Call) (rows int64, err error) {
	if err := q.session.core.May(ctx, "compute", q.name); err != nil {
		return 0, err
	}
	if call.Params, call.State = q.params, q.state; q.state != nil {
		rows, err = q.state.Rows(*call)
	} else {
		info := q.model.Info()
		if info.Rows == engine.AllAxes { // elements are independent: a row is what people see as one
			info.Rows = engine.AllButLast
		}
		rows, err = info.Check(*call)
	}
	if err == nil && rows > q.most-q.rows {
		err = failures.Refusal("FAILED_PRECONDITION", "model %q: a step of %d rows, and its sequence has room for %d of its %d; begin one with a larger max_rows", q.name, rows, q.most-q.rows, q.most)
	}
	return rows, err
}

// answered notes that a step has ended well; the session is locked.
func (q *sequence) answered(rows int64) {
	if q != nil {
		q.rows += rows
		q.busy = false
		q.rest.Reset(q.idle)
	}
}

// failed notes that a step has ended with err, and returns what to tell of it. If it had not
// begun to compute, the state is as it was before, unless it is lost.
func (q *sequence) failed(err error, began bool) error {
	if q == nil {
		return err
	}
	if lost := errors.Is(err, engine.ErrStateLost); began || lost {
		q.end()
		if lost {
			err = fmt.Errorf("%w; %d rows were answered", err, q.rows)
		}
		return err
	}
	q.session.Do(func(*stream.Machine, stream.Instant) { q.answered(0) })
	return err
}

// rested ends the sequence if no step has come.
func (q *sequence) rested() { q.endIf(func() bool { return !q.busy }) }

// end ends the sequence, unless it has ended. Its state stays until a step that is under way is over.
func (q *sequence) end() { q.endIf(func() bool { return true }) }

// endIf ends the sequence if may, called with the session locked, says so.
func (q *sequence) endIf(may func() bool) {
	s, here := q.session, false
	s.Do(func(*stream.Machine, stream.Instant) {
		if here = s.sequences[q.id] == q && may(); here {
			delete(s.sequences, q.id)
		}
	})
	if here {
		q.unuse()
	}
}

// unuse gives up the state after its last use.
func (q *sequence) unuse() {
	if q == nil {
		return
	}
	last := false
	q.session.Do(func(*stream.Machine, stream.Instant) {
		q.uses--
		last = q.uses == 0
	})
	if !last {
		return
	}
	if q.rest != nil {
		q.rest.Stop()
	}
	if q.state != nil {
		q.state.Close()
	}
	q.over(q.lost)
}

// stateless reports whether q is nil or has no state: then giving it up runs no code of a model.
func (q *sequence) stateless() bool { return q == nil || q.state == nil }

// lose notes how the run of a step was closed.
func (q *sequence) lose(closed error) {
	if closed != nil {
		q.session.Do(func(*stream.Machine, stream.Instant) { q.lost = closed })
	}
}

// endSequences ends those of a session whose calls are over.
func (s *Session) endSequences() {
	var all []*sequence
	s.Do(func(*stream.Machine, stream.Instant) { all = slices.Collect(maps.Values(s.sequences)) })
	for _, q := range all {
		q.end()
	}
}

// stateBytes returns what the states of the session's sequences take; the session is locked.
func (s *Session) stateBytes() (n int64) {
	for _, q := range s.sequences {
		if q.state != nil {
			n += q.state.Bytes()
		}
	}
	return n
}
