// Package builtin says what the models are that need no files, so that they are the
// same on every engine.
//
// It refuses to compute: engines bind what it checks. Everything in it is read-only;
// descs that it returns are copies.
package builtin

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/tensor"
)

// MaxDelay bounds what a caller may ask slow to sleep per block: longer than any test
// waits, shorter than what looks like a hang.
const MaxDelay = time.Minute

// The models. All but sink are elementwise. A param that a model does not know is refused.
var (
	// Echo: y is x; any data type and shape.
	Echo = elementwise("echo", nil)
	// ReLU: y is max(x, 0); floats and signed integers.
	ReLU = elementwise("relu", slices.Sorted(maps.Keys(nans)))
	// Affine: y is a·x + b, each operation rounded, for float64 and float32; float16 and
	// bfloat16 are computed as float32 and then rounded once more.
	Affine = elementwise("affine", []tensor.DataType{tensor.Float32, tensor.Float16, tensor.BFloat16, tensor.Float64},
		engine.Param{Name: "a", Kind: "number", Default: "1", Meaning: "factor of x"},
		engine.Param{Name: "b", Kind: "number", Default: "0", Meaning: "added to the product"})
	// Slow: y is x, after a while.
	Slow = elementwise("slow", nil,
		engine.Param{Name: "delay", Kind: "duration", Default: "0s", Meaning: "sleep before each block, at most " + MaxDelay.String()},
		engine.Param{Name: "fail_at", Kind: "row", Meaning: "the block that holds this row fails"})
	// Sink: bytes is the size of x, which it takes whole, as a uint64 scalar.
	Sink = engine.Info{
		Name: "sink", Version: "1", Idempotent: true,
		Inputs:  []engine.Port{{Name: "x", Shape: []int64{engine.AnyAxes}}},
		Outputs: []engine.Port{{Name: "bytes", DTypes: []tensor.DataType{tensor.Uint64}}},
	}
)

func elementwise(name string, dtypes []tensor.DataType, params ...engine.Param) engine.Info {
	port := func(name string) []engine.Port {
		return []engine.Port{{Name: name, DTypes: dtypes, Shape: []int64{engine.AnyAxes}}}
	}
	return engine.Info{Name: name, Version: "1", Rows: engine.AllAxes, Params: params, Idempotent: true, Inputs: port("x"), Outputs: port("y")}
}

// Outs describes the output of a call that info's Check has accepted.
func Outs(info engine.Info, c engine.Call) []tensor.Desc {
	if info.Name == Sink.Name {
		return []tensor.Desc{{DType: tensor.Uint64}}
	}
	return c.Descs()
}

// AffineOf reads the params of a call of Affine, as what it computes in.
func AffineOf(c engine.Call) (a, b float64, err error) {
	dtype := tensor.Float32
	if c.Inputs[0].Desc.DType == tensor.Float64 {
		dtype = tensor.Float64
	}
	var numbers [2]float64
	for i, p := range Affine.Params {
		text, ok := c.Params[p.Name]
		if !ok {
			text = p.Default
		}
		if numbers[i], err = strconv.ParseFloat(text, dtype.Bits()); err != nil || numbers[i]-numbers[i] != 0 {
			return 0, 0, fmt.Errorf("%w: %q: wanted a finite %v, got %q", engine.ErrParam, p.Name, dtype, text)
		}
	}
	return numbers[0], numbers[1], nil
}

// Words is how ReLU treats all elements of a 64-bit word at once, without a branch. An
// element is kept when its sign bit is clear, or when it is a NaN: its other bits, with NaN
// added, then carry into the place of the sign. -0 becomes 0, as any negative number does.
//
//	keep := ((x&^Sign + NaN) | ^x) & Sign
//	y := x & (keep | (keep - keep>>Shift))
type Words struct {
	Sign  uint64 // the sign bit of each element
	NaN   uint64 // in each element the largest magnitude (as bits) minus that of infinity
	Shift uint   // from the sign bit to the lowest
}

// nans holds the data types of ReLU and their NaN. Integers have none: nothing carries.
var nans = map[tensor.DataType]uint64{
	tensor.Int8: 0, tensor.Int16: 0, tensor.Int32: 0, tensor.Int64: 0,
	tensor.Float16: 1<<10 - 1, tensor.BFloat16: 1<<7 - 1, tensor.Float32: 1<<23 - 1, tensor.Float64: 1<<52 - 1,
}

// WordsOf returns the Words of a data type that ReLU takes.
func WordsOf(d tensor.DataType) Words {
	bits := d.Bits()
	w := Words{Shift: uint(bits-1) & 63}
	for at := 0; at < 64; at += bits {
		w.Sign |= 1 << (at + bits - 1)
		w.NaN |= nans[d] << at
	}
	return w
}
