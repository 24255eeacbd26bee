package cpu

import (
	"context"
	"fmt"
	"slices"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/blocks"
	"github.com/tensorferry/tensorferry/tensor"
)

// Chain makes one model of several on the same host: the outputs of each are the
// inputs of the next, by place. Where every model is split into rows, a block
// goes through all of them before the next one starts: nothing in between is
// held whole. Where one needs its input whole, the chain does.
//
// The models are those of this package, or wrappers of them (see engine.As). Params go to every model.
// The models stay the caller's: closing the chain closes none of them.
func Chain(name string, models ...engine.Model) (engine.Model, error) {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: chain %q: %s", engine.ErrInfo, name, fmt.Sprintf(format, args...))
	}
	if len(models) == 0 {
		return nil, bad("needs a model")
	}
	var links []*model
	for _, m := range models {
		link, ok := engine.As[*model](m)
		switch {
		case !ok:
			return nil, bad("model %q is a %T; wanted one that a RowFunc, a Func, a Chain or a stack made", m.Info().Name, m)
		case len(links) > 0 && link.host != links[0].host:
			return nil, bad("model %q is on another host than %q", m.Info().Name, models[0].Info().Name)
		case link.links != nil: // a chain within the chain
			links = append(links, link.links...)
		default:
			links = append(links, link)
		}
	}
	k := chain{links[0].Info(), links}
	for _, link := range links[1:] {
		info := link.Info()
		if len(k.info.Outputs) != len(info.Inputs) {
			return nil, bad("%d outputs cannot feed the %d inputs of %q", len(k.info.Outputs), len(info.Inputs), info.Name)
		}
		k.info.Rows = coarser(k.info.Rows, info.Rows)
		if slices.ContainsFunc(info.Inputs, func(p engine.Port) bool { return p.Whole }) {
			k.info.Rows = 0
		}
		k.info.Idempotent = k.info.Idempotent && info.Idempotent
		k.info.Version += "+" + info.Version
		for _, p := range info.Params { // each model reads those of its names
			if !slices.ContainsFunc(k.info.Params, func(o engine.Param) bool { return o.Name == p.Name }) {
				k.info.Params = append(slices.Clip(k.info.Params), p)
			}
		}
		k.info.Outputs = info.Outputs
	}
	k.info.Name, k.info.About = name, nil
	made := blocks.Model{Info: k.info, Bind: k.bind}
	if at := slices.IndexFunc(links, func(m *model) bool { return m.keeps }); at >= 0 {
		made.Begin = func(context.Context, engine.Sequence) (engine.State, error) {
			return nil, fmt.Errorf("%w: model %q: %q keeps a state in a sequence, which a chain does not: have a sequence of each",
				engine.ErrPrecondition, name, links[at].Info().Name)
		}
	}
	return links[0].host.model(made, links...)
}

// coarser returns the rows that two models can be cut into alike.
func coarser(a, b int) int {
	switch {
	case a >= 0 == (b >= 0):
		return min(a, b)
	case min(a, b) == engine.AllAxes: // elementwise goes along with anything
		return max(a, b)
	default: // all but the last axis: at least one, but how many only a rank tells
		return min(1, max(a, b))
	}
}

type chain struct {
	info  engine.Info
	links []*model
}

// step is one model of a chain, tied to a call.
type step struct {
	blocks.Bound
	name   string
	rows   int64
	outRow []int64       // bytes of a row, by output
	descs  []tensor.Desc // of its inputs
	factor int64         // its rows in one row of the chain
}

// bind ties m to a call whose inputs are the outputs of the model before it; those
// of the first are the call's own.
func (m *model) bind(c engine.Call, outs []tensor.Desc, first bool) (s step, err error) {
	info := m.Info()
	if !first {
		c.Inputs = make([]engine.Input, len(outs))
		for i, d := range outs {
			c.Inputs[i] = engine.Input{Port: info.Inputs[i].Name, Desc: d, ChunkBytes: 1}
		}
	}
	s = step{name: info.Name, descs: c.Descs(), factor: 1}
	s.Bound, s.rows, s.outRow, err = blocks.Bind(m, c)
	return s, err
}

func (k chain) bind(c engine.Call) (blocks.Bound, error) {
	var steps []step
	all := blocks.Bound{Results: blocks.Given}
	var outs []tensor.Desc
	for i, m := range k.links {
		s, err := m.bind(c, outs, i == 0)
		if err != nil {
			return all, err
		}
		steps, outs = append(steps, s), s.Outs
		all.Memory = append(all.Memory, s.Memory...)
		if outs == nil {
			break // what it returns is known once it has run
		}
	}
	if k.info.Rows != 0 {
		return k.fuse(all, steps)
	}
	for _, s := range steps { // of what is made in between
		for _, w := range s.outRow {
			if s.Results == blocks.Own {
				all.Memory = append(all.Memory, w*s.rows)
			}
		}
	}
	all.Program = wholeFunc(func(ctx context.Context, ts []tensor.Tensor) (_ []tensor.Tensor, err error) {
		for i, m := range k.links {
			if ts, err = m.compute(ctx, c, ts, i == 0); err != nil {
				return nil, fmt.Errorf("%q: %w", m.Info().Name, err)
			}
		}
		return ts, nil
	})
	return all, nil
}

// compute runs m on whole tensors, as one block. The results' memory is the Go
// heap's, or the inputs' where m computes in place.
func (m *model) compute(ctx context.Context, c engine.Call, in []tensor.Tensor, first bool) ([]tensor.Tensor, error) {
	descs := make([]tensor.Desc, len(in))
	b := RowBlock{In: make([][]byte, len(in)), Whole: make([][]byte, len(in)), Params: c.Params}
	for i, t := range in {
		if _, err := tensor.New(t.Desc, t.Data); err != nil {
			return nil, err
		}
		descs[i] = t.Desc
		if m.Info().Inputs[i].Whole {
			b.Whole[i] = t.Data
		} else {
			b.In[i] = t.Data
		}
	}
	s, err := m.bind(c, descs, first)
	if err != nil {
		return nil, err
	}
	if f, ok := s.Program.(wholeFunc); ok {
		return f(ctx, in)
	}
	b.Rows, b.Descs, b.OutDescs = s.rows, s.descs, s.Outs
	if s.Results == blocks.InPlace {
		b.Out = onlySplit(b.In)
	}
	out := make([]tensor.Tensor, len(s.Outs))
	for i, d := range s.Outs {
		if s.Results == blocks.Own {
			b.Out = append(b.Out, make([]byte, s.outRow[i]*s.rows))
		}
		out[i] = tensor.Tensor{Desc: d, Data: b.Out[i]}
	}
	if s.rows == 0 {
		return out, nil
	}
	return out, rowsOf(s.Program)(ctx, b)
}

// fuse makes one RowsFunc of the steps: each block goes through all of them. What
// lies between two steps is scratch memory of the block; the last step that does
// not compute in place writes the block's own output.
func (k chain) fuse(all blocks.Bound, steps []step) (blocks.Bound, error) {
	all.Outs, all.Results = steps[len(steps)-1].Outs, blocks.InPlace
	rows, _, err := all.Outs[0].Rows(k.info.Axes(len(all.Outs[0].Shape)))
	if err != nil {
		return all, err
	}
	writer := -1
	for i := range steps {
		s := &steps[i]
		if rows > 0 {
			if s.factor = s.rows / rows; s.rows%rows != 0 {
				return all, fmt.Errorf("the %d rows of model %q are not cut by the chain's %d", s.rows, s.name, rows)
			}
		}
		if s.Results == blocks.Own {
			writer, all.Results = i, blocks.Own
		}
	}
	for i, s := range steps {
		if s.Results == blocks.Own && i != writer {
			for _, w := range s.outRow { // a row of the chain is never more than the tensor
				all.Scratch = append(all.Scratch, w*s.factor)
			}
		}
	}
	all.Program = restingRows(func(ctx context.Context, b RowBlock) error {
		in, whole, mem := b.In, b.Whole, b.Scratch
		for i := range steps {
			s := &steps[i]
			out := b.Out
			switch {
			case s.Results == blocks.InPlace:
				out = onlySplit(in)
			case i != writer:
				out, mem = mem[:len(s.outRow)], mem[len(s.outRow):]
			}
			err := rowsOf(s.Program)(ctx, RowBlock{
				Row: b.Row * s.factor, Rows: b.Rows * s.factor, In: in, Whole: whole, Out: out,
				Descs: s.descs, OutDescs: s.Outs, Params: b.Params,
			})
			if err != nil {
				return fmt.Errorf("%q: %w", s.name, err)
			}
			in, whole = out, nil
		}
		return nil
	})
	return all, nil
}

// onlySplit returns the only input that is split into rows, in place of an output.
func onlySplit(in [][]byte) [][]byte {
	i := slices.IndexFunc(in, func(data []byte) bool { return data != nil })
	return in[i : i+1 : i+1]
}
