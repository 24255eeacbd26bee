package cpu

import (
	"context"
	"fmt"
	"strconv"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/slab"
)

// sequence is the state of a stack model of items in a sequence, whose rows are the positions of
// one item: each call has the next ones. It belongs to one call at a time.
type sequence struct {
	info  engine.Info
	model *layers
	past  int // positions that the calls before had
	most  int // that there may be
	// cache has the keys and values of most positions for one attention layer after the other. It is
	// of the heap: a block that is computed until after Close still has it, and nobody else does.
	cache []float32
	held  []*slab.Account
}

// begin begins a sequence of m, with memory for all of its positions.
func (h *Host) begin(ctx context.Context, info engine.Info, m *layers, q engine.Sequence) (engine.State, error) {
	switch {
	case m.Mask:
		return nil, fmt.Errorf("%w: model %q has an input \"mask\", and the rows of a sequence have none: send all positions in one call", engine.ErrPrecondition, m.Name)
	case m.ahead:
		return nil, fmt.Errorf("%w: model %q has attention that is not causal, so a position depends on later ones: send all positions in one call", engine.ErrPrecondition, m.Name)
	}
	s := &sequence{info: info, model: m, most: int(min(q.MaxRows, int64(m.Positions)))}
	size := s.most * m.keep
	if size == 0 {
		return s, nil
	}
	for _, budget := range []*slab.Budget{h.kept, h.budget} {
		a := budget.Account(q.Principal)
		if err := a.Wait(ctx, 4*int64(size)); err != nil {
			s.Close()
			return nil, fmt.Errorf("engine: model %q: memory for a sequence of %d rows: %w", m.Name, s.most, err)
		}
		s.held = append(s.held, a)
	}
	s.cache = make([]float32, size)
	return s, nil
}

// Rows implements engine.State.
func (s *sequence) Rows(c engine.Call) (int64, error) {
	if _, err := s.info.Check(c); err != nil {
		return 0, err
	}
	_, n, err := s.model.Bind(c)
	x := c.Inputs[0].Desc
	switch {
	case err != nil:
		return 0, err
	case x.Shape[0] != 1:
		return 0, s.refuse("1 item, whose positions are the rows of the sequence", x.String())
	case n > s.model.Positions-s.past:
		return 0, s.refuse(fmt.Sprintf("at most %d positions in a sequence, which has %d", s.model.Positions, s.past), strconv.Itoa(n)+" more")
	}
	return int64(n), nil
}

// room checks a call of n positions, and returns how many there are with it.
func (s *sequence) room(c engine.Call, n int) (int, error) {
	if _, err := s.Rows(c); err != nil {
		return 0, err
	}
	if n > s.most-s.past {
		return 0, s.refuse(fmt.Sprintf("at most %d rows in a sequence, as it began, which has %d", s.most, s.past), strconv.Itoa(n)+" more")
	}
	return s.past + n, nil
}

func (s *sequence) refuse(want, got string) error {
	return &engine.InputError{Model: s.model.Name, Port: "x", Want: want, Got: got}
}

// Bytes implements engine.State.
func (s *sequence) Bytes() int64 { return 4 * int64(len(s.cache)) }

// Close implements engine.State.
func (s *sequence) Close() {
	for _, a := range s.held {
		a.Close()
	}
}

// keep appends the keys and values of a tile to those of an attention layer in the sequence, and
// returns all: t.most keys a row, one number of each, and values a position a row.
func (t *tile) keep(out int) (columns, values []float32) {
	size := t.most * out
	columns, values, t.cache = t.cache[:size], t.cache[size:2*size], t.cache[2*size:]
	for r := range t.rows {
		x, at := t.x[r*3*out+out:][:2*out], t.past+r
		for j, v := range x[:out] {
			columns[j*t.most+at] = v
		}
		copy(values[at*out:], x[out:])
	}
	return columns, values
}
