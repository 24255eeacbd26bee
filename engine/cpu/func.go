package cpu

import (
	"context"
	"fmt"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/blocks"
	"github.com/tensorferry/tensorferry/tensor"
)

// RowsFunc computes one block of rows: it reads b.In and b.Whole and writes every byte of
// b.Out. Several blocks of a call are computed at once. It returns soon after ctx ends.
type RowsFunc func(ctx context.Context, b RowBlock) error

// RowBlock is what a RowsFunc gets: the same rows of every input and output.
type RowBlock = blocks.RowBlock

// Rows returns a RowsFunc of a function that sees elements instead of bytes: the same rows of
// every input, or all of a Whole one, and of every output, all of one type.
func Rows[T tensor.Element](f func(ctx context.Context, b RowBlock, in, out [][]T) error) RowsFunc {
	return func(ctx context.Context, b RowBlock) (err error) {
		in, out := make([][]T, len(b.In)), make([][]T, len(b.Out))
		for i, data := range b.In {
			if data == nil {
				data = b.Whole[i]
			}
			if in[i], err = tensor.Slice[T](tensor.Tensor{Desc: b.Descs[i], Data: data}); err != nil {
				return fmt.Errorf("input %d: %w", i, err)
			}
		}
		for i, data := range b.Out {
			if out[i], err = tensor.Slice[T](tensor.Tensor{Desc: b.OutDescs[i], Data: data}); err != nil {
				return fmt.Errorf("output %d: %w", i, err)
			}
		}
		return f(ctx, b, in, out)
	}
}

// RowFunc is a model whose rows are independent of each other: Info.Rows says
// which axes are rows. Each block is computed as soon as it is there.
type RowFunc struct {
	Info engine.Info
	// Outs describes the outputs of a call. Nil: each output has the desc of the
	// input at the same place. An error refuses the call (wraps ErrInput).
	Outs func(in []tensor.Desc, params map[string]string) ([]tensor.Desc, error)
	// Rows computes one block.
	Rows RowsFunc
	// Bind, if set, makes the Rows of one call, for what is worth doing once (such
	// as reading params). An error refuses the call (wraps ErrInput).
	Bind func(c engine.Call) (RowsFunc, error)
	// Begin, if set, makes the State of a sequence, which Bind finds in its calls, one at a time.
	Begin func(ctx context.Context, q engine.Sequence) (engine.State, error)
	// InPlace says that Out[0] is the memory of the only split input, with rows of
	// the same size, and halves the memory of a run.
	InPlace bool
	quick   bool // as blocks.Model.Quick
	// Setup, if set, runs once in Model. Teardown, if set, runs once, when the
	// model is closed: by a Registry after its last use.
	Setup    func() error
	Teardown func()
}

// Model makes f ready to run on h: it validates what f says about itself (errors
// wrap ErrInfo) and runs Setup (errors wrap ErrModel).
func (f RowFunc) Model(h *Host) (engine.Model, error) {
	if f.Rows == nil && f.Bind == nil {
		return nil, fmt.Errorf("%w: model %q: needs Rows or Bind", engine.ErrInfo, f.Info.Name)
	}
	if f.Outs == nil && len(f.Info.Outputs) > len(f.Info.Inputs) {
		return nil, fmt.Errorf("%w: model %q: more outputs than inputs need Outs", engine.ErrInfo, f.Info.Name)
	}
	return h.engine.Model(blocks.Model{Info: f.Info, Bind: f.bind, Begin: f.Begin, Setup: f.Setup, Teardown: f.Teardown, Quick: f.quick})
}

func (f RowFunc) bind(c engine.Call) (b blocks.Bound, err error) {
	if f.InPlace {
		b.Results = blocks.InPlace
	}
	rows := f.Rows
	if in := c.Descs(); f.Outs == nil {
		b.Outs = in[:len(f.Info.Outputs)]
	} else if b.Outs, err = f.Outs(in, c.Params); err != nil {
		return b, err
	}
	if f.Bind != nil {
		rows, err = f.Bind(c)
	}
	b.Program = rows
	return b, err
}

// Func is a model that needs its inputs whole. Info.Rows is 0.
type Func struct {
	Info engine.Info
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

// wholeFunc is the program of a Func tied to a call.
type wholeFunc func(ctx context.Context, in []tensor.Tensor) ([]tensor.Tensor, error)

// Model makes f ready to run on h, as RowFunc.Model does.
func (f Func) Model(h *Host) (engine.Model, error) {
	if f.Call == nil || f.Info.Rows != 0 {
		return nil, fmt.Errorf("%w: model %q: a Func needs a Call and 0 rows, it has %d", engine.ErrInfo, f.Info.Name, f.Info.Rows)
	}
	return h.engine.Model(blocks.Model{Info: f.Info, Bind: f.bind, Setup: f.Setup, Teardown: f.Teardown})
}

func (f Func) bind(c engine.Call) (b blocks.Bound, err error) {
	b.Results = blocks.Given
	b.Program = wholeFunc(func(ctx context.Context, in []tensor.Tensor) ([]tensor.Tensor, error) {
		return f.Call(ctx, in, c.Params)
	})
	if f.Memory == nil {
		return b, nil
	}
	bytes, err := f.Memory(c.Descs(), c.Params)
	if err == nil && bytes < 0 {
		err = fmt.Errorf("memory of %d bytes", bytes)
	}
	b.Memory = []int64{bytes}
	return b, err
}
