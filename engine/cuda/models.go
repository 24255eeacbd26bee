//go:build linux && cgo

package cuda

import (
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/blocks"
	"github.com/tensorferry/tensorferry/engine/builtin"
	"github.com/tensorferry/tensorferry/engine/cuda/kernels"
	"github.com/tensorferry/tensorferry/tensor"
)

// floats are what kernels call the data types that they take.
var floats = map[tensor.DataType]kernels.Float{
	tensor.Float32: kernels.F32, tensor.Float16: kernels.F16, tensor.BFloat16: kernels.BF16, tensor.Float64: kernels.F64,
}

// program is what a model tied to a call has the device do with its blocks.
type program struct {
	begun int          // blocks; the submitter's
	times blocks.Times // of the last block that was timed; finish's
	// check, if it is set, refuses a block for what is in it.
	check func(*blocks.Work) error
	// second is where in the memory a second input goes.
	second func(rows int64) int64
	// memory is how many bytes rows take on the device, nil for the more of input and result.
	memory func(rows int64) int64
	// launch computes rows, whose input is bytes at x, and returns where in the memory
	// the result lies. Nil leaves the input as it is.
	launch func(l *lane, rows, bytes int64, x kernels.Address) (y kernels.Address)
}

// Builtins returns the models that need no files, made ready on h: echo, relu, affine
// and sink, as package builtin says.
func Builtins(h *Host) []engine.Model {
	var all []engine.Model
	for _, m := range []struct {
		info engine.Info
		bind func(engine.Call) (program, error)
	}{
		{builtin.Echo, func(engine.Call) (program, error) { return program{}, nil }},
		{builtin.ReLU, bindReLU},
		{builtin.Affine, bindAffine},
		{builtin.Sink, bindSink},
	} {
		made, err := h.engine.Model(blocks.Model{Info: m.info, Gauges: h.gauges, Bind: func(c engine.Call) (blocks.Bound, error) {
			p, err := m.bind(c)
			return blocks.Bound{Outs: builtin.Outs(m.info, c), Program: &p}, err
		}})
		if err != nil {
			panic("cuda: built-in model: " + err.Error()) // only a mistake in the table above
		}
		all = append(all, made)
	}
	return all
}

// inPlace is a program of one kernel.
func inPlace[K kernels.Launch](k func(x kernels.Address, bytes int64) K) (program, error) {
	return program{launch: func(l *lane, _, bytes int64, x kernels.Address) kernels.Address {
		add(l, k(x, bytes))
		return x
	}}, nil
}

func bindReLU(c engine.Call) (program, error) {
	r := builtin.WordsOf(c.Inputs[0].Desc.DType)
	return inPlace(func(x kernels.Address, bytes int64) kernels.ReLUWords {
		// The last word may be of fewer bytes: a lane has room for all of it.
		return kernels.ReLUWords{X: x, Words: uint64(bytes+7) / 8, Sign: r.Sign, NaN: r.NaN, Shift: uint32(r.Shift)}
	})
}

func bindAffine(c engine.Call) (program, error) {
	a, b, err := builtin.AffineOf(c)
	if err != nil {
		return program{}, err
	}
	dtype := c.Inputs[0].Desc.DType
	if dtype != tensor.Float64 {
		each := int64(dtype.Bits() / 8)
		return inPlace(func(x kernels.Address, bytes int64) kernels.AffineF32 {
			return kernels.AffineF32{X: x, N: kernels.N(bytes / each), A: float32(a), B: float32(b), Type: floats[dtype]}
		})
	}
	return inPlace(func(x kernels.Address, bytes int64) kernels.AffineF64 {
		return kernels.AffineF64{X: x, N: kernels.N(bytes / 8), A: a, B: b}
	})
}

// bindSink overwrites the input with its size, when all of it has come.
func bindSink(engine.Call) (program, error) {
	return inPlace(func(x kernels.Address, bytes int64) kernels.StoreU64 {
		return kernels.StoreU64{Y: x, V: uint64(bytes)}
	})
}
