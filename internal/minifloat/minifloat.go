// Package minifloat converts the floats that Go has no type for, float16,
// bfloat16 and the 8-bit ones, from and to float64: exactly one way, rounded to
// the nearest, ties to even, the other. Everything that rounds to them does so here,
// but kernels of GPUs.
//
// It refuses to know tensors or bytes: elements are bits. All of it is safe for concurrent use.
package minifloat

import (
	"math"
	"sync"

	"github.com/tensorferry/tensorferry/tensor"
)

// Format is how a small float is laid out: a sign, exponent bits, Mantissa bits.
type Format struct {
	Mantissa int
	// Values lends the value of each pattern of bits, exactly. They are read-only.
	Values func() []float32
	// The magnitudes, without the sign, of a quiet NaN, of the largest value (an infinity,
	// if there is one), and of what is larger.
	nan, most, beyond uint16
	sign              int    // the place of its bit
	rebias            uint64 // what a float64's exponent is larger by, in place
	least             uint64 // the bits of the smallest normal value as a float64
	steps             float64
}

// wideMantissa and wideBias are a float64's.
const (
	wideMantissa = 52
	wideBias     = 1023
)

var formats = map[tensor.DataType]*Format{
	tensor.Float16:      format(5, 10, false),
	tensor.BFloat16:     format(8, 7, false),
	tensor.Float8E4M3FN: format(4, 3, true),
	tensor.Float8E5M2:   format(5, 2, false),
}

func format(exponent, mantissa int, finite bool) *Format {
	bias := 1<<(exponent-1) - 1
	f := &Format{
		Mantissa: mantissa, sign: exponent + mantissa,
		rebias: uint64(wideBias-bias) << wideMantissa,
		least:  uint64(wideBias-bias+1) << wideMantissa,
		steps:  math.Ldexp(1, wideMantissa+1-bias-mantissa),
	}
	if infinity := uint16(1<<exponent-1) << mantissa; finite { // no infinity, and NaN is only the pattern of all ones
		f.nan = infinity | (1<<mantissa - 1)
		f.most, f.beyond = f.nan-1, f.nan
	} else {
		f.nan, f.most, f.beyond = infinity|1<<(mantissa-1), infinity, infinity
	}
	f.Values = sync.OnceValue(func() []float32 {
		all := make([]float32, 2<<f.sign)
		for bits := range all {
			all[bits] = float32(f.value(bits, bias))
		}
		return all
	})
	return f
}

// value computes one of Values.
func (f *Format) value(bits, bias int) float64 {
	magnitude := bits & (1<<f.sign - 1)
	exponent, mantissa := magnitude>>f.Mantissa, magnitude&(1<<f.Mantissa-1)
	v := math.Ldexp(float64(mantissa), 1-bias-f.Mantissa) // a subnormal: so many steps of the smallest one
	switch {
	case magnitude > int(f.most):
		return math.NaN()
	case magnitude == int(f.beyond):
		v = math.Inf(1)
	case exponent > 0:
		v = math.Ldexp(float64(mantissa|1<<f.Mantissa), exponent-bias-f.Mantissa)
	}
	if bits>>f.sign != 0 {
		return math.Copysign(v, -1)
	}
	return v
}

// Of returns the format of a data type, and false if the data type is no small float.
func Of(d tensor.DataType) (*Format, bool) {
	f, ok := formats[d]
	return f, ok
}

// Encode returns the bits of the value that is nearest to v. What is too large
// becomes an infinity, or NaN where there is none, as in PyTorch.
func (f *Format) Encode(v float64) uint16 {
	wide := math.Float64bits(v)
	sign, magnitude := uint16(wide>>63)<<f.sign, wide&^(1<<63)
	drop := uint(wideMantissa-f.Mantissa) & 63
	switch {
	case v != v:
		return sign | f.nan
	case magnitude < f.least: // the sum has the steps of subnormals, and the processor rounds it
		magnitude = math.Float64bits(math.Float64frombits(magnitude)+f.steps) - math.Float64bits(f.steps)
	default: // what rounding carries goes into the exponent, as it should
		magnitude = (magnitude - f.rebias + 1<<(drop-1) - 1 + magnitude>>drop&1) >> drop
	}
	if magnitude > uint64(f.most) {
		return sign | f.beyond
	}
	return sign | uint16(magnitude)
}
