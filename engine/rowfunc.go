package engine

import (
	"context"
	"errors"
	"fmt"

	"github.com/tensorferry/tensorferry/tensor"
)

// RowsFunc computes one block of rows: it reads b.In and b.Whole and writes every
// byte of b.Out. Several blocks of a call are computed at once. It returns soon
// after ctx ends.
type RowsFunc func(ctx context.Context, b RowBlock) error

// RowBlock is what a RowsFunc gets: the same rows of every input and output.
// The memory is lent until the function returns; so are the slices.
type RowBlock struct {
	Row, Rows int64             // Rows is 1 or more: empty tensors are not computed
	In        [][]byte          // by input port; nil for a Whole one
	Whole     [][]byte          // by input port; nil for one that is split, read-only
	Out       [][]byte          // by output port; in place, Out[0] is the input's memory
	Descs     []tensor.Desc     // of the whole inputs, read-only
	OutDescs  []tensor.Desc     // of the whole outputs, read-only
	Params    map[string]string // of the call, read-only

	scratch []byte
}

// RowFunc is a model whose rows are independent of each other: Info.Rows says
// which axes are rows. Each block is computed as soon as it is there.
type RowFunc struct {
	Info Info
	// Outs describes the outputs of a call. Nil: each output has the desc of the
	// input at the same place. An error refuses the call (wraps ErrInput).
	Outs func(in []tensor.Desc, params map[string]string) ([]tensor.Desc, error)
	// Rows computes one block.
	Rows RowsFunc
	// Bind, if set, makes the Rows of one call, for what is worth doing once (such
	// as reading params). An error refuses the call (wraps ErrInput).
	Bind func(c Call) (RowsFunc, error)
	// InPlace says that Out[0] is the memory of the only split input, with rows of
	// the same size, and halves the memory of a run.
	InPlace bool
	// Setup, if set, runs once in Model. Teardown, if set, runs once, when the
	// model is closed: by a Registry after its last use.
	Setup    func() error
	Teardown func()
}

// Model makes f ready to run on h: it validates what f says about itself (errors
// wrap ErrInfo) and runs Setup (errors wrap ErrModel).
func (f RowFunc) Model(h *Host) (Model, error) {
	if f.Rows == nil && f.Bind == nil {
		return nil, fmt.Errorf("%w: model %q: needs Rows or Bind", ErrInfo, f.Info.Name)
	}
	if f.Outs == nil && len(f.Info.Outputs) > len(f.Info.Inputs) {
		return nil, fmt.Errorf("%w: model %q: more outputs than inputs need Outs", ErrInfo, f.Info.Name)
	}
	return newModel(h, f.Info, f.bind, f.Setup, f.Teardown)
}

func (f RowFunc) bind(c Call) (bound, error) {
	b := bound{kernel: f.Rows, inPlace: f.InPlace}
	in := descs(c)
	var err error
	if f.Outs == nil {
		b.outs = in[:len(f.Info.Outputs)]
	} else if b.outs, err = f.Outs(in, c.Params); err != nil {
		return bound{}, err
	}
	if f.Bind != nil {
		if b.kernel, err = f.Bind(c); err != nil {
			return bound{}, err
		}
	}
	return b, nil
}

// Func is a model that needs its inputs whole. Info.Rows is 0.
type Func struct {
	Info Info
	// Call computes the outputs. The inputs are lent until the outputs have been
	// sent; an output may be an input, or part of one. The outputs' memory is
	// handed over. It returns soon after ctx ends.
	Call func(ctx context.Context, in []tensor.Tensor, params map[string]string) ([]tensor.Tensor, error)
	// Memory, if set, is how many bytes Call takes beside its inputs: they
	// count in the host's budget for as long as the run lasts.
	Memory func(in []tensor.Desc, params map[string]string) (int64, error)
	// Setup and Teardown are as in RowFunc.
	Setup    func() error
	Teardown func()
}

// Model makes f ready to run on h, as RowFunc.Model does.
func (f Func) Model(h *Host) (Model, error) {
	if f.Call == nil || f.Info.Rows != 0 {
		return nil, fmt.Errorf("%w: model %q: a Func needs a Call and 0 rows, it has %d", ErrInfo, f.Info.Name, f.Info.Rows)
	}
	return newModel(h, f.Info, f.bind, f.Setup, f.Teardown)
}

func (f Func) bind(c Call) (bound, error) {
	var b bound
	if f.Memory != nil {
		n, err := f.Memory(descs(c), c.Params)
		if err != nil || n < 0 {
			return bound{}, errors.Join(err, negative(n))
		}
		b.fixed = n
	}
	b.foreign = func(ctx context.Context, rb RowBlock) ([]tensor.Tensor, error) {
		in := make([]tensor.Tensor, len(rb.In))
		for i := range in {
			in[i] = tensor.Tensor{Desc: rb.Descs[i], Data: either(rb.In[i], rb.Whole, i)}
		}
		out, err := f.Call(ctx, in, rb.Params)
		if err != nil {
			return nil, err
		}
		if len(out) != len(f.Info.Outputs) {
			return nil, fmt.Errorf("returned %d outputs, its info says %d", len(out), len(f.Info.Outputs))
		}
		for i, p := range f.Info.Outputs {
			if _, err := tensor.New(out[i].Desc, out[i].Data); err != nil {
				return nil, fmt.Errorf("output %q: %w", p.Name, err)
			}
			if !p.fits(out[i].Desc) {
				return nil, fmt.Errorf("output %q is %v, its info says %s", p.Name, out[i].Desc, p.wants())
			}
		}
		return out, nil
	}
	return b, nil
}

func negative(n int64) error {
	if n >= 0 {
		return nil
	}
	return fmt.Errorf("memory of %d bytes", n)
}
