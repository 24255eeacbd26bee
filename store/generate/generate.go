// Package generate makes tensors from a seed, in any pieces. Any program may use it. It
// fills bytes that the caller lends.
package generate

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/tensorferry/tensorferry/internal/minifloat"
	"github.com/tensorferry/tensorferry/tensor"
)

// ErrFill is wrapped when there is no such fill, or not for a data type.
var ErrFill = errors.New("generate: bad fill")

// Fill says what a generated tensor holds.
type Fill string

// The fills.
const (
	// FillNormal is N(0, 1), for floats; of a complex number both parts are.
	FillNormal Fill = "normal"
	// FillUniform is [0, 1) for floats and both parts of complex numbers, every
	// value of the data type for integers, 0 and 1 for bool.
	FillUniform Fill = "uniform"
	// FillZeros is all zero.
	FillZeros Fill = "zeros"
	// FillCount is the element's index in row-major order, converted: integers
	// wrap around, floats round, a bool is whether it is not 0.
	FillCount Fill = "count"
)

// Fills returns the names that ParseFill knows.
func Fills() []string {
	return []string{string(FillNormal), string(FillUniform), string(FillZeros), string(FillCount)}
}

// ParseFill finds a fill by its name for tensors of data type d. The empty name is
// FillNormal for floats and complex numbers, FillUniform for the others. Errors
// wrap ErrFill.
func ParseFill(name string, d tensor.DataType) (Fill, error) {
	switch {
	case name == "" && d.Whole():
		return FillUniform, nil
	case name == "":
		return FillNormal, nil
	case !slices.Contains(Fills(), name):
		return "", fmt.Errorf("%w: %.64q is not a fill; known: %v", ErrFill, name, Fills())
	case name == string(FillNormal) && d.Whole():
		return "", fmt.Errorf("%w: fill normal is for floats and complex numbers, not for %v; use uniform", ErrFill, d)
	}
	return Fill(name), nil
}

// Bytes fills p, which the caller lends, with the bytes from off on of the tensor of
// dtype, seed and fill, whatever its shape. An element depends on its index alone, so
// the bytes are the same in whatever pieces, on every machine and for ever. Not for
// secrets. dtype must be valid, fill one that ParseFill gives for it, and off 0 or more.
// Safe for concurrent use.
func Bytes(p []byte, off int64, dtype tensor.DataType, seed uint64, fill Fill) {
	if fill == FillZeros {
		clear(p)
		return
	}
	g := generator{part: dtype, parts: 1, seed: seed, fill: fill}
	switch dtype {
	case tensor.Complex64:
		g.part, g.parts = tensor.Float32, 2
	case tensor.Complex128:
		g.part, g.parts = tensor.Float64, 2
	}
	g.small, _ = minifloat.Of(g.part)
	width := int64(g.part.Bits() / 8)
	n, skip := uint64(off/width), int(off%width) // p begins in part n
	if skip > 0 {
		p = p[g.piece(p, n, skip):]
		n++
	}
	for len(p) >= int(width) {
		count := min(len(p)/int(width), batch)
		g.write(p[:count*int(width)], n, count)
		p = p[count*int(width):]
		n += uint64(count)
	}
	g.piece(p, n, 0)
}

// batch is how many values are made at a time, on the stack.
const batch = 512

// generator makes the parts of elements: an element itself, or the real and the
// imaginary part of a complex one.
type generator struct {
	part  tensor.DataType
	parts uint64            // of an element
	small *minifloat.Format // of a part, nil if it is no small float
	seed  uint64
	fill  Fill
}

// piece writes what p has room for of part n without its first skip bytes, and
// returns how much that is.
func (g *generator) piece(p []byte, n uint64, skip int) int {
	var all [8]byte
	width := g.part.Bits() / 8
	g.write(all[:width], n, 1)
	return copy(p, all[skip:width])
}

// write writes count parts, at most batch, from part n on; p has room for just these.
func (g *generator) write(p []byte, n uint64, count int) {
	if !g.part.Whole() {
		var all [batch]float64
		values := all[:count]
		g.floats(values, n)
		switch {
		case g.part == tensor.Float64:
			for i, v := range values {
				binary.LittleEndian.PutUint64(p[8*i:], math.Float64bits(v))
			}
		case g.part == tensor.Float32:
			for i, v := range values {
				binary.LittleEndian.PutUint32(p[4*i:], math.Float32bits(float32(v)))
			}
		case g.part.Bits() == 16:
			for i, v := range values {
				binary.LittleEndian.PutUint16(p[2*i:], g.small.Encode(v))
			}
		default:
			for i, v := range values {
				p[i] = byte(g.small.Encode(v))
			}
		}
		return
	}
	var all [batch]uint64
	values := all[:count]
	g.integers(values, n)
	switch g.part.Bits() {
	case 64:
		for i, v := range values {
			binary.LittleEndian.PutUint64(p[8*i:], v)
		}
	case 32:
		for i, v := range values {
			binary.LittleEndian.PutUint32(p[4*i:], uint32(v))
		}
	case 16:
		for i, v := range values {
			binary.LittleEndian.PutUint16(p[2*i:], uint16(v))
		}
	default:
		for i, v := range values {
			p[i] = byte(v)
		}
	}
}

// word is output n, counted from 0, of SplitMix64 seeded with seed. Its state is a
// counter, so that any output comes at once. From G. L. Steele, D. Lea,
// C. H. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014; the
// constants are those of mix variant 13 there.
func (g *generator) word(n uint64) uint64 {
	z := g.seed + (n+1)*0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// floats makes parts from part n on. Uniform ones have no more bits than the data
// type has, its leading one included: they are not rounded, and never to 1.
func (g *generator) floats(to []float64, n uint64) {
	switch g.fill {
	case FillNormal:
		for i := range to {
			to[i] = normal(g.word(n + uint64(i)))
		}
	case FillUniform:
		precision := 53
		switch {
		case g.small != nil:
			precision = g.small.Mantissa + 1
		case g.part == tensor.Float32:
			precision = 24
		}
		step := math.Ldexp(1, -precision)
		for i := range to {
			to[i] = float64(g.word(n+uint64(i))>>(64-precision)) * step
		}
	default: // FillCount
		for i := range to {
			to[i] = 0 // an imaginary part
			if part := n + uint64(i); part%g.parts == 0 {
				to[i] = float64(part / g.parts)
			}
		}
	}
}

// integers makes parts from part n on, each in the lowest bits.
func (g *generator) integers(to []uint64, n uint64) {
	bits := g.part.Bits()
	if g.part == tensor.Bool {
		bits = 1
	}
	uniform := g.fill == FillUniform
	for i := range to {
		part := n + uint64(i)
		switch {
		case uniform:
			to[i] = g.word(part) >> (64 - bits)
		case g.part == tensor.Bool:
			to[i] = min(part, 1)
		default:
			to[i] = part
		}
	}
}
