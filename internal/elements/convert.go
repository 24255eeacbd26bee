package elements

import (
	"math"

	"github.com/tensorferry/tensorferry/internal/minifloat"
	"github.com/tensorferry/tensorferry/tensor"
)

// Convert writes the elements of src, real numbers of type from, to dst as float32 or float16,
// each rounded to the nearest. It borrows both; dst may share the memory of src, from its start,
// if its elements are not wider.
func Convert(dst []byte, to tensor.DataType, src []byte, from tensor.DataType) {
	number, width := numberOf(from), from.Bits()/8
	switch from { // numbers that float64 does not hold are not to be rounded twice
	case tensor.Int64:
		number = func(b []byte) float64 { return float64(float32(int64(le.Uint64(b)))) }
	case tensor.Uint64:
		number = func(b []byte) float64 { return float64(float32(le.Uint64(b))) }
	}
	if f, small := minifloat.Of(to); small {
		for i := range len(src) / width {
			le.PutUint16(dst[2*i:], f.Encode(number(src[width*i:])))
		}
		return
	}
	for i := range len(src) / width {
		le.PutUint32(dst[4*i:], math.Float32bits(float32(number(src[width*i:]))))
	}
}
