// Package elements looks at single elements of tensors: what they are as text, which of
// them a slice has, and in which two tensors differ.
//
// It reads tensors once, front to back, in a fixed amount of memory, and refuses to hold
// one. It borrows the bytes it reads. Everything belongs to one goroutine.
package elements

import (
	"encoding/binary"
	"encoding/json"
	"math"
	"strconv"

	"github.com/tensorferry/tensorferry/internal/minifloat"
	"github.com/tensorferry/tensorferry/tensor"
)

var le = binary.LittleEndian

// value is an element: whole numbers are exact.
type value struct {
	whole     bool
	negative  bool
	magnitude uint64     // of a whole number
	number    complex128 // of any other
	bits      int        // of a float; a text that is this one is as long as it must be
	isComplex bool
	isBool    bool
}

// valueOf reads the element that b, which is borrowed, begins with.
func valueOf(d tensor.DataType, b []byte) value {
	signed := func(n int64) value {
		if n < 0 {
			return value{whole: true, negative: true, magnitude: -uint64(n)}
		}
		return value{whole: true, magnitude: uint64(n)}
	}
	if f, small := minifloat.Of(d); small {
		bits := uint16(b[0])
		if d.Bits() == 16 {
			bits = le.Uint16(b)
		}
		return value{number: complex(f.Decode(bits), 0), bits: 32}
	}
	f32 := func(b []byte) float64 { return float64(math.Float32frombits(le.Uint32(b))) }
	f64 := func(b []byte) float64 { return math.Float64frombits(le.Uint64(b)) }
	switch d {
	case tensor.Bool:
		return value{whole: true, isBool: true, magnitude: uint64(min(b[0], 1))}
	case tensor.Int8:
		return signed(int64(int8(b[0])))
	case tensor.Int16:
		return signed(int64(int16(le.Uint16(b))))
	case tensor.Int32:
		return signed(int64(int32(le.Uint32(b))))
	case tensor.Int64:
		return signed(int64(le.Uint64(b)))
	case tensor.Uint8:
		return value{whole: true, magnitude: uint64(b[0])}
	case tensor.Uint16:
		return value{whole: true, magnitude: uint64(le.Uint16(b))}
	case tensor.Uint32:
		return value{whole: true, magnitude: uint64(le.Uint32(b))}
	case tensor.Uint64:
		return value{whole: true, magnitude: le.Uint64(b)}
	case tensor.Float32:
		return value{number: complex(f32(b), 0), bits: 32}
	case tensor.Float64:
		return value{number: complex(f64(b), 0), bits: 64}
	case tensor.Complex64:
		return value{number: complex(f32(b), f32(b[4:])), bits: 32, isComplex: true}
	default: // Complex128
		return value{number: complex(f64(b), f64(b[8:])), bits: 64, isComplex: true}
	}
}

// JSON returns the element that b, which is borrowed, begins with: a number, true or
// false, [real, imaginary], and "NaN", "Infinity" and "-Infinity" as strings, since JSON
// has no such numbers. It is exact.
func JSON(d tensor.DataType, b []byte) json.RawMessage {
	v := valueOf(d, b)
	part := func(n float64) string {
		switch {
		case math.IsNaN(n):
			return `"NaN"`
		case math.IsInf(n, 1):
			return `"Infinity"`
		case math.IsInf(n, -1):
			return `"-Infinity"`
		}
		return strconv.FormatFloat(n, 'g', -1, v.bits)
	}
	switch {
	case v.isBool:
		return json.RawMessage(strconv.FormatBool(v.magnitude == 1))
	case v.whole:
		return json.RawMessage(v.wholeText())
	case v.isComplex:
		return json.RawMessage("[" + part(real(v.number)) + "," + part(imag(v.number)) + "]")
	}
	return json.RawMessage(part(real(v.number)))
}

// Text returns the element that b, which is borrowed, begins with as people read it. It
// is exact.
func Text(d tensor.DataType, b []byte) string {
	v := valueOf(d, b)
	switch {
	case v.isBool:
		return strconv.FormatBool(v.magnitude == 1)
	case v.whole:
		return v.wholeText()
	case v.isComplex:
		text := strconv.FormatComplex(v.number, 'g', -1, 2*v.bits)
		return text[1 : len(text)-1] // without the parentheses
	}
	return strconv.FormatFloat(real(v.number), 'g', -1, v.bits)
}

func (v *value) wholeText() string {
	text := strconv.FormatUint(v.magnitude, 10)
	if v.negative {
		text = "-" + text
	}
	return text
}
