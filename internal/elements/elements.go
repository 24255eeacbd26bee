// Package elements looks at the elements of tensors: what they are as text, which of them a
// slice has, in which two tensors differ, and what all of them are in a few numbers.
//
// It reads tensors once, front to back, in a fixed amount of memory, and refuses to hold
// one. It borrows the bytes it reads. Everything belongs to one goroutine.
package elements

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"

	"github.com/tensorferry/tensorferry/internal/minifloat"
	"github.com/tensorferry/tensorferry/tensor"
)

var le = binary.LittleEndian

// word reads the little-endian number of width bytes that b begins with.
func word(b []byte, width int) uint64 {
	switch width {
	case 1:
		return uint64(b[0])
	case 2:
		return uint64(le.Uint16(b))
	case 4:
		return uint64(le.Uint32(b))
	}
	return le.Uint64(b)
}

// fill reads the next bytes of a tensor of size bytes, of which r has yielded at.
func fill(b []byte, r io.Reader, at, size int64) error {
	n, err := io.ReadFull(r, b)
	if err != nil {
		return fmt.Errorf("elements: ended after %d of %d bytes: %w", at+int64(n), size, unexpected(err))
	}
	return nil
}

// unexpected is an error in the middle of a tensor: it is not to end there.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// wholeOf reads the whole number that b, which is borrowed, begins with: as an int64, if it may
// be negative.
func wholeOf(d tensor.DataType, b []byte) uint64 {
	n := word(b, d.Bits()/8)
	switch unused := 64 - d.Bits(); {
	case signed(d):
		return uint64(int64(n<<unused) >> unused)
	case d == tensor.Bool:
		return min(n, 1)
	}
	return n
}

// complexOf reads any other number.
func complexOf(d tensor.DataType, b []byte) complex128 {
	part := partOf(d)
	if paired(d) {
		return complex(part(b), part(b[d.Bits()/16:]))
	}
	return complex(part(b), 0)
}

// paired reports whether an element has a real and an imaginary part.
func paired(d tensor.DataType) bool { return d == tensor.Complex64 || d == tensor.Complex128 }

// partOf returns what turns the element that b begins with, or its real part, into a number.
func partOf(d tensor.DataType) func(b []byte) float64 {
	width, unused := d.Bits()/8, 64-d.Bits()
	f, small := minifloat.Of(d)
	switch {
	case small:
		values := f.Values()
		return func(b []byte) float64 { return float64(values[word(b, width)]) }
	case d == tensor.Bool:
		return func(b []byte) float64 { return float64(min(b[0], 1)) }
	case signed(d):
		return func(b []byte) float64 { return float64(int64(word(b, width)<<unused) >> unused) }
	case d.Whole():
		return func(b []byte) float64 { return float64(word(b, width)) }
	case precision(d) == 32:
		return func(b []byte) float64 { return float64(math.Float32frombits(le.Uint32(b))) }
	}
	return func(b []byte) float64 { return math.Float64frombits(le.Uint64(b)) }
}

// numberOf is partOf, but a complex element is its magnitude.
func numberOf(d tensor.DataType) func(b []byte) float64 {
	part, half := partOf(d), d.Bits()/16
	if !paired(d) {
		return part
	}
	return func(b []byte) float64 { return magnitude(part(b), part(b[half:])) }
}

// precision is how many bits the shortest text for a float is to tell apart.
func precision(d tensor.DataType) int {
	if d == tensor.Float64 || d == tensor.Complex128 {
		return 64
	}
	return 32
}

func signed(d tensor.DataType) bool { return d >= tensor.Int8 && d <= tensor.Int64 }

// JSON returns the element that b, which is borrowed, begins with: a number, true or
// false, [real, imaginary], and "NaN", "Infinity" and "-Infinity" as strings, since JSON
// has no such numbers. It is exact.
func JSON(d tensor.DataType, b []byte) json.RawMessage {
	if d.Whole() {
		return json.RawMessage(Text(d, b))
	}
	part := func(n float64) string {
		switch {
		case math.IsNaN(n):
			return `"NaN"`
		case math.IsInf(n, 1):
			return `"Infinity"`
		case math.IsInf(n, -1):
			return `"-Infinity"`
		}
		return strconv.FormatFloat(n, 'g', -1, precision(d))
	}
	n := complexOf(d, b)
	if paired(d) {
		return json.RawMessage("[" + part(real(n)) + "," + part(imag(n)) + "]")
	}
	return json.RawMessage(part(real(n)))
}

// Text returns the element that b, which is borrowed, begins with as people read it, exactly.
func Text(d tensor.DataType, b []byte) string {
	switch {
	case d == tensor.Bool:
		return strconv.FormatBool(wholeOf(d, b) == 1)
	case signed(d):
		return strconv.FormatInt(int64(wholeOf(d, b)), 10)
	case d.Whole():
		return strconv.FormatUint(wholeOf(d, b), 10)
	case paired(d):
		text := strconv.FormatComplex(complexOf(d, b), 'g', -1, 2*precision(d))
		return text[1 : len(text)-1] // without the parentheses
	}
	return strconv.FormatFloat(partOf(d)(b), 'g', -1, precision(d))
}
