package stack

import (
	"encoding/binary"
	"math"

	"github.com/tensorferry/tensorferry/internal/minifloat"
	"github.com/tensorferry/tensorferry/tensor"
)

// Float turns the elements of one data type into float32 and back, rounding to
// nearest even. Load reads len(dst) elements, Store writes len(src); they borrow
// both, and the bytes need no alignment.
type Float struct {
	Bytes int // of an element
	Load  func(dst []float32, src []byte)
	Store func(dst []byte, src []float32)
}

// DTypes are the data types of weights, inputs and outputs.
var DTypes = []tensor.DataType{tensor.Float32, tensor.Float16, tensor.BFloat16, tensor.Float64}

// FloatOf returns the Float of one of DTypes, and false for any other data type.
func FloatOf(d tensor.DataType) (Float, bool) {
	f, ok := floats[d]
	return f, ok
}

var floats = map[tensor.DataType]Float{
	tensor.Float32: {4,
		func(dst []float32, src []byte) {
			for i := range dst {
				dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(src[4*i:]))
			}
		},
		func(dst []byte, src []float32) {
			for i, v := range src {
				binary.LittleEndian.PutUint32(dst[4*i:], math.Float32bits(v))
			}
		}},
	tensor.Float16:  half(tensor.Float16),
	tensor.BFloat16: half(tensor.BFloat16),
	tensor.Float64: {8,
		func(dst []float32, src []byte) {
			for i := range dst {
				dst[i] = float32(math.Float64frombits(binary.LittleEndian.Uint64(src[8*i:])))
			}
		},
		func(dst []byte, src []float32) {
			for i, v := range src {
				binary.LittleEndian.PutUint64(dst[8*i:], math.Float64bits(float64(v)))
			}
		}},
}

func half(d tensor.DataType) Float {
	f, _ := minifloat.Of(d)
	return Float{2,
		func(dst []float32, src []byte) {
			values := f.Values()
			for i := range dst {
				dst[i] = values[binary.LittleEndian.Uint16(src[2*i:])]
			}
		},
		func(dst []byte, src []float32) {
			for i, v := range src {
				binary.LittleEndian.PutUint16(dst[2*i:], f.Encode(float64(v)))
			}
		}}
}
