// Package minifloat converts the floats that Go has no type for, float16,
// bfloat16 and the 8-bit ones, from and to float64: exactly one way, rounded to
// the nearest, ties to even, the other.
//
// It refuses to know tensors or bytes: elements are bits. All of it is safe for concurrent use.
package minifloat

import (
	"math"

	"github.com/tensorferry/tensorferry/tensor"
)

// Format is how a small float is laid out: a sign, Exponent bits, Mantissa bits.
type Format struct {
	Exponent, Mantissa int
	// Finite: there is no infinity, and NaN is only the pattern of all ones.
	Finite bool
}

// What of a float64 the conversions look at.
const (
	wideMantissa = 52
	wideBias     = 1023
	wideSpecial  = 0x7ff // the exponent of infinities and NaNs
)

var formats = map[tensor.DataType]Format{
	tensor.Float16:      {5, 10, false},
	tensor.BFloat16:     {8, 7, false},
	tensor.Float8E4M3FN: {4, 3, true},
	tensor.Float8E5M2:   {5, 2, false},
}

// Of returns the format of a data type, and false if the data type is no small float.
func Of(d tensor.DataType) (Format, bool) {
	f, ok := formats[d]
	return f, ok
}

func (f Format) bias() int { return 1<<(f.Exponent-1) - 1 }

// nan is the quiet NaN without a sign. In a format with infinities the bits above
// an infinity's are NaNs; in one without, only all ones.
func (f Format) nan() uint16 {
	if f.Finite {
		return 1<<(f.Exponent+f.Mantissa) - 1
	}
	return f.infinity() | 1<<(f.Mantissa-1)
}

func (f Format) infinity() uint16 { return (1<<f.Exponent - 1) << f.Mantissa }

// Decode returns the value of an element's bits, exactly.
func (f Format) Decode(bits uint16) float64 {
	sign := uint64(bits>>(f.Exponent+f.Mantissa)) << 63
	magnitude := bits & (1<<(f.Exponent+f.Mantissa) - 1)
	exponent, mantissa := int(magnitude>>f.Mantissa), uint64(magnitude&(1<<f.Mantissa-1))
	switch {
	case f.Finite && magnitude == f.nan(), !f.Finite && magnitude > f.infinity():
		return math.NaN()
	case !f.Finite && magnitude == f.infinity():
		return math.Float64frombits(sign | wideSpecial<<wideMantissa)
	case exponent == 0: // subnormal: so many steps of the smallest one
		smallest := math.Float64frombits(uint64(wideBias+1-f.bias()-f.Mantissa) << wideMantissa)
		return math.Copysign(float64(mantissa)*smallest, math.Float64frombits(sign|1<<wideMantissa))
	}
	return math.Float64frombits(sign | uint64(exponent-f.bias()+wideBias)<<wideMantissa | mantissa<<(wideMantissa-f.Mantissa))
}

// Encode returns the bits of the value that is nearest to v. What is too large
// becomes an infinity, or NaN where there is none, as in PyTorch.
func (f Format) Encode(v float64) uint16 {
	wide := math.Float64bits(v)
	sign := uint16(wide>>63) << (f.Exponent + f.Mantissa)
	exponent := int(wide>>wideMantissa&wideSpecial) - wideBias
	mantissa := wide&(1<<wideMantissa-1) | 1<<wideMantissa
	if v != v {
		return sign | f.nan()
	}
	// A value is q steps of 2^(e-Mantissa), where e is its exponent but no less
	// than that of subnormals: then the exponent's place and q add up to the bits,
	// with q's leading bit, or one that rounding carries, where they belong.
	over := exponent - (1 - f.bias())
	shift := wideMantissa - f.Mantissa + max(0, -over)
	if shift > wideMantissa+1 {
		return sign // less than half of the smallest
	}
	q, rest, half := mantissa>>shift, mantissa&(1<<shift-1), uint64(1)<<(shift-1)
	if rest > half || rest == half && q&1 == 1 {
		q++
	}
	// over is below 2^11 and q at most 2^(Mantissa+1): far from 64 bits.
	magnitude := uint64(max(0, over))<<f.Mantissa + q
	switch most := uint64(f.infinity()); {
	case f.Finite && magnitude >= uint64(f.nan()):
		return sign | f.nan()
	case !f.Finite && magnitude > most:
		return sign | f.infinity()
	}
	return sign | uint16(magnitude)
}
