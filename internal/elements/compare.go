package elements

import (
	"bytes"
	"encoding/json"
	"io"
	"math"
	"math/cmplx"

	"github.com/tensorferry/tensorferry/tensor"
)

// compareBytes are compared at a time, a multiple of any element's size.
const compareBytes = 64 << 10

// Tolerance is how far an element a may be from b: Abs + Rel*|b|, as NumPy's allclose has
// it. NaN equals NaN, and an infinity itself.
type Tolerance struct{ Abs, Rel float64 }

// Difference is an element in which two tensors differ.
type Difference struct {
	Index []int64         `json:"index"`
	A     json.RawMessage `json:"a"` // as JSON has them
	B     json.RawMessage `json:"b"`

	TextA, TextB string `json:"-"`
}

// Comparison is in what two tensors differ.
type Comparison struct {
	Elements, Different int64
	// NonFinite is how many of those that differ are infinite or NaN in a or b.
	NonFinite int64
	// MaxAbs and MaxRel, which is divided by |b|, are the largest differences of finite
	// elements that differ. MaxRel is infinite if such an element of b is 0.
	MaxAbs, MaxRel float64
	First          []Difference
}

// Compare compares two tensors of one desc, whose bytes a and b yield, and keeps the
// first differences. Both are read to the end of the tensor and no further, and are
// borrowed.
func Compare(d tensor.Desc, a, b io.Reader, t Tolerance, first int) (Comparison, error) {
	size, err := d.Bytes()
	if err != nil {
		return Comparison{}, err
	}
	whole, err := ParseSlice("", d)
	if err != nil {
		return Comparison{}, err
	}
	width := int64(d.DType.Bits() / 8)
	c := Comparison{Elements: size / width}
	bufA, bufB := make([]byte, min(size, compareBytes)), make([]byte, min(size, compareBytes))
	for at := int64(0); at < size; at += int64(len(bufA)) {
		n := min(int64(len(bufA)), size-at)
		bufA, bufB = bufA[:n], bufB[:n]
		for i, buf := range [][]byte{bufA, bufB} {
			if err := fill(buf, []io.Reader{a, b}[i], at, size); err != nil {
				return Comparison{}, err
			}
		}
		if bytes.Equal(bufA, bufB) {
			continue
		}
		for off := int64(0); off < n; off += width {
			x, y := bufA[off:off+width], bufB[off:off+width]
			if bytes.Equal(x, y) {
				continue
			}
			abs, of := distance(d.DType, x, y)
			if abs <= t.Abs+t.Rel*of {
				continue
			}
			c.Different++
			if abs > math.MaxFloat64 {
				c.NonFinite++
			} else {
				c.MaxAbs = max(c.MaxAbs, abs)
				if abs > 0 {
					c.MaxRel = max(c.MaxRel, abs/of)
				}
			}
			if len(c.First) < first {
				c.First = append(c.First, Difference{
					Index: whole.Index((at + off) / width), A: JSON(d.DType, x), B: JSON(d.DType, y), TextA: Text(d.DType, x), TextB: Text(d.DType, y),
				})
			}
		}
	}
	return c, nil
}

// distance is how far the element at x is from that at y, 0 if they are equal and infinite if
// one of them is not finite, and the magnitude of that at y.
func distance(d tensor.DataType, x, y []byte) (abs, of float64) {
	if d.Whole() {
		a, b := wholeOf(d, x), wholeOf(d, y)
		if less := a < b; less != (signed(d) && int64(a^b) < 0) { // of two signs it is the other way
			a, b = b, a
		}
		return float64(a - b), math.Abs(partOf(d)(y))
	}
	a, b := complexOf(d, x), complexOf(d, y)
	if a == b || cmplx.IsNaN(a) && cmplx.IsNaN(b) {
		return 0, 0
	}
	for _, v := range []complex128{a, b} {
		if cmplx.IsNaN(v) || cmplx.IsInf(v) {
			return math.Inf(1), 0
		}
	}
	return min(cmplx.Abs(a-b), math.MaxFloat64), cmplx.Abs(b)
}
