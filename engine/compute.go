package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/tensorferry/tensorferry/tensor"
)

// Compute runs a model over tensors that lie whole in this process, one for each
// input port in the model's order, and returns its outputs in theirs: what a
// bottom or a top model needs, whose other part runs elsewhere. It borrows in
// until it returns, with the goroutine it starts; the outputs are copies. Params
// may be nil. Errors are those of Open and of the run.
func Compute(ctx context.Context, m Model, params map[string]string, in ...tensor.Tensor) (out []tensor.Tensor, err error) {
	return compute(ctx, m, Call{Params: params}, in)
}

// Step runs the next call of a sequence of m as Compute does, and borrows in as that does. s is
// what Begin of m returned: nil where the calls are independent.
func Step(ctx context.Context, m Model, s State, in ...tensor.Tensor) (out []tensor.Tensor, err error) {
	return compute(ctx, m, Call{State: s}, in)
}

func compute(ctx context.Context, m Model, c Call, in []tensor.Tensor) (out []tensor.Tensor, err error) {
	info := m.Info()
	for i, t := range in {
		if _, err := tensor.New(t.Desc, t.Data); err != nil {
			return nil, fmt.Errorf("%w: model %q, input %d: %w", ErrInput, info.Name, i, err)
		}
		port := "" // too many are for Check to tell
		if i < len(info.Inputs) {
			port = info.Inputs[i].Name
		}
		c.Inputs = append(c.Inputs, Input{Port: port, Desc: t.Desc, ChunkBytes: tensor.ChunkFor(t.Desc, ChunkBytes)})
	}
	r, err := m.Open(ctx, c)
	if err != nil {
		return nil, err
	}
	out, _, err = Collect(ctx, info, r, in, func(int64) error { return nil })
	return out, err
}

// Collect fills a run's inputs from tensors that lie whole in this process, in
// the order of the ports of info, collects its outputs, and closes it. It borrows
// in until it returns, with the goroutine it starts; the outputs are copies. It asks
// take before it makes memory for one, and fails with its error.
func Collect(ctx context.Context, info Info, r Run, in []tensor.Tensor, take func(bytes int64) error) (out []tensor.Tensor, st Stats, err error) {
	ctx, cancel := context.WithCancel(ctx)
	var feeding sync.WaitGroup
	if fill(ctx, r, in, true) {
		feeding.Go(func() { fill(ctx, r, in, false) })
	}
	defer func() {
		cancel()
		feeding.Wait()
		st = r.Stats()
		if e := r.Close(); e != nil {
			out, err = nil, errors.Join(err, e)
		}
	}()
	out = make([]tensor.Tensor, len(info.Outputs))
	for {
		o, err := r.Next(ctx)
		switch {
		case errors.Is(err, io.EOF):
			return out, st, nil
		case err != nil:
			return nil, st, err
		}
		t := &out[o.Port]
		if t.Data == nil {
			n, err := o.Desc.Bytes()
			if err == nil {
				err = take(n)
			}
			if err != nil {
				o.Release()
				return nil, st, err
			}
			*t = tensor.Tensor{Desc: o.Desc.Clone(), Data: make([]byte, n)}
		}
		copy(t.Data[o.Off:], o.Data)
		o.Release()
	}
}

// fill copies the inputs into the blocks of a run, or only into the first one, for which no
// result need be taken. It ends with the last block, or with the run: why that failed is for
// Next to tell. It reports whether there is more to fill.
func fill(ctx context.Context, r Run, in []tensor.Tensor, first bool) (more bool) {
	for {
		b, err := r.Borrow(ctx)
		if err != nil {
			return false
		}
		more = true
		for i, mem := range b.In {
			if mem == nil {
				continue // not in this block
			}
			off := int64(0)
			if !b.Whole && b.Rows > 0 {
				off = b.Row * (int64(len(mem)) / b.Rows)
			}
			if n := copy(mem, in[i].Data[off:]); n > 0 && n == len(in[i].Data[off:]) && !b.Whole {
				more = false
			}
		}
		done := !more || first && !b.Whole
		r.Filled(b)
		if done {
			return more
		}
	}
}
