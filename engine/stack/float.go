package stack

import (
	"encoding/binary"
	"math"

	"github.com/x448/float16"

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
	tensor.Float16: {2,
		func(dst []float32, src []byte) {
			for i := range dst {
				dst[i] = float16.Frombits(binary.LittleEndian.Uint16(src[2*i:])).Float32()
			}
		},
		func(dst []byte, src []float32) {
			for i, v := range src {
				binary.LittleEndian.PutUint16(dst[2*i:], float16.Fromfloat32(v).Bits())
			}
		}},
	tensor.BFloat16: {2,
		func(dst []float32, src []byte) {
			for i := range dst {
				dst[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(src[2*i:])) << 16)
			}
		},
		func(dst []byte, src []float32) {
			for i, v := range src {
				binary.LittleEndian.PutUint16(dst[2*i:], bfloat16(v))
			}
		}},
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

// bfloat16 is the upper half of v, rounded to nearest even. The rounding must not
// carry a NaN into infinity: it becomes the quiet one.
func bfloat16(v float32) uint16 {
	u := math.Float32bits(v)
	if v != v {
		return uint16(u>>16) | 1<<6
	}
	return uint16((u + 0x7fff + u>>16&1) >> 16)
}
