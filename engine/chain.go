package engine

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/tensorferry/tensorferry/tensor"
)

// Chain makes one model of several on the same host: the outputs of each are the
// inputs of the next, by place. Where every model is split into rows, a block
// goes through all of them before the next one starts: nothing in between is
// held whole. Where one needs its input whole, the chain does.
//
// The models are those that this package and engine/cpu make, Named or not: others
// bring memory of their own. Params go to every model. The models stay the caller's: closing the chain
// closes none of them.
func Chain(name string, models ...Model) (Model, error) {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: chain %q: %s", ErrInfo, name, fmt.Sprintf(format, args...))
	}
	if len(models) == 0 {
		return nil, bad("needs a model")
	}
	k := chain{info: models[0].Info()}
	k.info.Name, k.info.Version = name, ""
	for i, m := range models {
		link, ok := unnamed(m).(*model)
		if !ok {
			return nil, bad("model %q is a %T; wanted one that a RowFunc, a Func, a Chain or engine/cpu made", m.Info().Name, m)
		}
		if i > 0 && link.host != k.links[0].host {
			return nil, bad("model %q is on another host than %q", m.Info().Name, models[0].Info().Name)
		}
		if i > 0 {
			if outs, ins := len(k.info.Outputs), len(link.info.Inputs); outs != ins {
				return nil, bad("%d outputs cannot feed the %d inputs of %q", outs, ins, link.info.Name)
			}
			if slices.ContainsFunc(link.info.Inputs, func(p Port) bool { return p.Whole }) {
				k.info.Rows = 0
			}
			k.info.Version += "+"
		}
		k.info.Version += link.info.Version
		k.info.Rows = coarser(k.info.Rows, link.info.Rows)
		k.info.Outputs = link.info.Outputs
		k.links = append(k.links, link)
	}
	return newModel(k.links[0].host, k.info, k.bind, nil, nil)
}

// coarser returns the rows that two models can be cut into alike.
func coarser(a, b int) int {
	switch {
	case a >= 0 == (b >= 0):
		return min(a, b)
	case min(a, b) == AllAxes: // elementwise goes along with anything
		return max(a, b)
	default: // all but the last axis: at least one, but how many only a rank tells
		return min(1, max(a, b))
	}
}

type chain struct {
	info  Info
	links []*model
}

// step is one model of a chain, tied to a call.
type step struct {
	plan
	bound
	descs  []tensor.Desc // of its inputs
	factor int64         // its rows in one row of the chain
}

func (k chain) bind(c Call) (bound, error) {
	rows, err := k.info.Check(c)
	if err != nil {
		return bound{}, err
	}
	var all bound
	var steps []step
	call := c
	for i, m := range k.links {
		if i > 0 {
			call = m.after(c, steps[i-1].outs)
		}
		p, b, err := m.plan(call)
		if err != nil {
			return bound{}, err
		}
		all.fixed = add(all.fixed, b.fixed)
		if b.foreign != nil {
			break // what it returns is known once it has run
		}
		s := step{plan: p, bound: b, descs: descs(call), factor: 1}
		if rows > 0 {
			if s.factor = p.rows / rows; p.rows%rows != 0 {
				return bound{}, fmt.Errorf("the %d rows of model %q are not cut by the chain's %d", p.rows, m.info.Name, rows)
			}
		}
		steps = append(steps, s)
	}
	if k.info.Rows != 0 {
		k.fuse(&all, steps)
		return all, nil
	}
	for _, s := range steps {
		if !s.inPlace {
			all.fixed = add(all.fixed, mul(s.rows, sum(s.outRow)))
		}
		all.fixed = add(all.fixed, add(mul(s.rows, s.scratchRow), s.scratch))
	}
	all.foreign = func(ctx context.Context, b RowBlock) (ts []tensor.Tensor, err error) {
		for i, d := range b.Descs {
			ts = append(ts, tensor.Tensor{Desc: d, Data: either(b.In[i], b.Whole, i)})
		}
		call := c
		for i, m := range k.links {
			if i > 0 {
				outs := make([]tensor.Desc, len(ts))
				for i, t := range ts {
					outs[i] = t.Desc
				}
				call = m.after(c, outs)
			}
			if ts, err = m.compute(ctx, call, ts); err != nil {
				return nil, fmt.Errorf("%q: %w", m.info.Name, err)
			}
		}
		return ts, nil
	}
	return all, nil
}

// after is the call of m whose inputs are the outputs of the model before it.
func (m *model) after(c Call, outs []tensor.Desc) Call {
	c.Inputs = make([]Input, len(outs))
	for i, d := range outs {
		c.Inputs[i] = Input{Port: m.info.Inputs[i].Name, Desc: d, ChunkBytes: 1}
	}
	return c
}

// compute runs m on whole tensors. The results' memory is the Go heap's, or the
// inputs' where m computes in place.
func (m *model) compute(ctx context.Context, c Call, in []tensor.Tensor) ([]tensor.Tensor, error) {
	p, b, err := m.plan(c)
	if err != nil {
		return nil, err
	}
	ports := make([][]byte, 3*len(in))
	rb := RowBlock{Rows: p.rows, In: ports[:len(in)], Whole: ports[len(in) : 2*len(in)], Descs: descs(c), OutDescs: b.outs, Params: c.Params}
	for i, t := range in {
		if m.info.Inputs[i].Whole {
			rb.Whole[i] = t.Data
		} else {
			rb.In[i] = t.Data
		}
	}
	if b.foreign != nil {
		return b.foreign(ctx, rb)
	}
	out := make([]tensor.Tensor, len(b.outs))
	rb.Out = make([][]byte, len(out))
	for i, d := range b.outs {
		if b.inPlace {
			rb.Out[i] = split(rb.In)
		} else {
			rb.Out[i] = make([]byte, p.outRow[i]*p.rows)
		}
		out[i] = tensor.Tensor{Desc: d, Data: rb.Out[i]}
	}
	if p.rows == 0 {
		return out, nil
	}
	rb.scratch = make([]byte, p.rows*b.scratchRow+b.scratch)
	return out, b.kernel(ctx, rb)
}

// fuse makes one RowsFunc of the steps: each block goes through all of them. What
// lies between two steps is scratch memory of the block; the last step that does
// not compute in place writes the block's own output.
func (k chain) fuse(all *bound, steps []step) {
	writer := -1
	for i, s := range steps {
		if !s.inPlace {
			writer = i
		}
	}
	views := sync.Pool{New: func() any {
		outs := make([][][]byte, len(steps))
		for i, s := range steps {
			outs[i] = make([][]byte, len(s.outs))
		}
		return &outs
	}}
	for i, s := range steps {
		if !s.inPlace && i != writer {
			all.scratchRow = add(all.scratchRow, mul(sum(s.outRow), s.factor))
			all.scratch = add(all.scratch, alignBytes*int64(len(s.outs)))
		}
		if s.scratchRow > 0 { // a chain within the chain
			all.scratchRow = add(all.scratchRow, mul(s.scratchRow, s.factor))
			all.scratch = add(all.scratch, add(s.scratch, alignBytes))
		}
	}
	all.outs = steps[len(steps)-1].outs
	all.inPlace = writer < 0
	all.kernel = func(ctx context.Context, b RowBlock) error {
		outs := views.Get().(*[][][]byte)
		defer views.Put(outs)
		mem, in, whole := b.scratch, b.In, b.Whole
		for i, s := range steps {
			rows, out := b.Rows*s.factor, (*outs)[i]
			switch {
			case s.inPlace:
				out[0] = split(in)
			case i == writer:
				copy(out, b.Out)
			default:
				mem = carve(mem, out, s.outRow, rows)
			}
			own := align(rows*s.scratchRow) + s.scratch
			err := s.kernel(ctx, RowBlock{
				Row: b.Row * s.factor, Rows: rows, In: in, Whole: whole, Out: out,
				Descs: s.descs, OutDescs: s.outs, Params: b.Params, scratch: mem[:own:own],
			})
			if err != nil {
				return fmt.Errorf("%q: %w", k.links[i].info.Name, err)
			}
			mem, in, whole = mem[own:], out, nil
		}
		return nil
	}
}

// split returns the only input that is split into rows.
func split(in [][]byte) []byte {
	for _, data := range in {
		if data != nil {
			return data
		}
	}
	return nil
}

func either(in []byte, whole [][]byte, port int) []byte {
	if in != nil {
		return in
	}
	return whole[port]
}

func sum(widths []int64) (n int64) {
	for _, w := range widths {
		n = add(n, max(w, 0))
	}
	return n
}
