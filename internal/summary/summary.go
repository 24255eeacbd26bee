// Package summary says in a few numbers what a tensor holds: the least, the most,
// mean, standard deviation, a histogram, and how many elements are NaN, infinite or
// zero.
//
// It reads a tensor once, front to back, in a fixed amount of memory, whatever the
// tensor's size, and refuses to hold it. It borrows the bytes it reads. Everything
// belongs to one goroutine.
package summary

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strconv"

	"github.com/tensorferry/tensorferry/internal/minifloat"
	"github.com/tensorferry/tensorferry/tensor"
)

// Summary is what a tensor holds. A complex element stands for its magnitude, a
// bool for 0 or 1.
type Summary struct {
	Elements int64
	// What is not finite is counted here and in nothing below. A complex element is
	// NaN if one of its parts is.
	NaN, PosInf, NegInf int64
	Zeros               int64
	// Min and Max are exact; empty if no element is finite.
	Min, Max json.Number
	// Mean and Std, the standard deviation of the whole (divided by n, not n-1);
	// 0 if no element is finite.
	Mean, Std float64

	finite    int64
	low, high float64 // Min and Max, rounded for 64-bit integers
	whole     bool    // integers and bool
	bins      histogram
}

// Of summarizes the tensor whose bytes r yields, and reads no byte more. If r ends
// early, the error wraps io.ErrUnexpectedEOF.
func Of(r io.Reader, d tensor.Desc) (*Summary, error) {
	size, err := d.Bytes()
	if err != nil {
		return nil, err
	}
	decode, width := decoderOf(d.DType), d.DType.Bits()/8
	s := &Summary{Elements: size / int64(width), low: math.Inf(1), high: math.Inf(-1), whole: d.DType.Whole()}
	s.bins.exp = leastBin
	if s.whole {
		s.bins.exp = 0
	}
	var m moments
	exact := extremes{signed: d.DType == tensor.Int64, low: math.MaxUint64}
	wide := d.DType == tensor.Int64 || d.DType == tensor.Uint64
	buf, values := make([]byte, block*width), make([]float64, block)
	for left := size; left > 0; {
		b := buf[:min(int64(len(buf)), left)]
		if n, err := io.ReadFull(r, b); err != nil {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return nil, fmt.Errorf("summary: ended after %d of %d bytes: %w", size-left+int64(n), size, err)
		}
		left -= int64(len(b))
		all := values[:len(b)/width]
		decode(all, b)
		if wide {
			exact.add(b)
		}
		s.add(all, &m)
	}
	if s.finite == 0 {
		return s, nil
	}
	s.Mean = min(max(math.Ldexp(m.mean, m.exp), s.low), s.high) // rounding shall not lead out
	s.Std = math.Ldexp(math.Sqrt(m.squares/m.n), m.exp)
	if wide {
		s.Min, s.Max = exact.text()
		return s, nil
	}
	bits := 32 // the shortest text that is this float32, which holds all smaller types
	if d.DType == tensor.Float64 || d.DType == tensor.Complex64 || d.DType == tensor.Complex128 {
		bits = 64
	}
	text := func(v float64) json.Number {
		if s.whole {
			return json.Number(strconv.FormatFloat(v, 'f', 0, 64))
		}
		return json.Number(strconv.FormatFloat(v, 'g', -1, bits))
	}
	s.Min, s.Max = text(s.low), text(s.high)
	return s, nil
}

// add counts the elements of a block, of which it keeps the finite ones in place.
func (s *Summary) add(values []float64, m *moments) {
	n, low, high := 0, s.low, s.high
	for _, v := range values {
		if !(math.Abs(v) <= math.MaxFloat64) {
			switch {
			case v > 0:
				s.PosInf++
			case v < 0:
				s.NegInf++
			default:
				s.NaN++
			}
			continue
		}
		if v == 0 {
			s.Zeros++
		}
		if v < low { // not min, which looks for NaN
			low = v
		}
		if v > high {
			high = v
		}
		values[n] = v
		n++
	}
	if n == 0 {
		return
	}
	finite := values[:n]
	s.low, s.high = low, high
	s.finite += int64(len(finite))
	s.bins.cover(s.low, s.high)
	s.bins.add(finite)
	m.add(finite, max(-s.low, s.high))
}

// moments are mean and sum of squared differences from it, of numbers that are
// divided by 2^exp: no larger than 1, so that no square overflows.
type moments struct {
	n, mean, squares float64
	exp              int
}

// add takes a block of numbers up to most in size. Within a block it is the corrected
// two-pass algorithm, between blocks the pairwise update, both from T. F. Chan,
// G. H. Golub, R. J. LeVeque, "Algorithms for Computing the Sample Variance",
// The American Statistician 37 (1983), 242-247.
func (m *moments) add(values []float64, most float64) {
	_, exp := math.Frexp(most)
	if exp = max(exp, leastBin); m.n == 0 {
		m.exp = exp
	} else if exp > m.exp {
		m.mean, m.squares = math.Ldexp(m.mean, m.exp-exp), math.Ldexp(m.squares, 2*(m.exp-exp))
		m.exp = exp
	}
	scale, n := math.Ldexp(1, -m.exp), float64(len(values))
	var mean float64
	for i, v := range values {
		values[i] = v * scale
		mean += values[i]
	}
	mean /= n
	var rest, squares float64
	for _, v := range values {
		rest += v - mean
		squares += (v - mean) * (v - mean)
	}
	mean += rest / n
	squares -= rest * rest / n
	all, apart := m.n+n, mean-m.mean
	m.squares += squares + apart*apart*(m.n*n/all)
	m.mean += apart * (n / all)
	m.n = all
}

// extremes are the least and the most of 64-bit integers, which a float64 would
// round: as keys whose order is that of the numbers.
type extremes struct {
	signed    bool
	low, high uint64
}

func (e *extremes) key(v uint64) uint64 {
	if e.signed {
		return v ^ 1<<63
	}
	return v
}

func (e *extremes) add(b []byte) {
	for ; len(b) > 0; b = b[8:] {
		k := e.key(binary.LittleEndian.Uint64(b))
		e.low, e.high = min(e.low, k), max(e.high, k)
	}
}

func (e *extremes) text() (low, high json.Number) {
	format := func(k uint64) json.Number {
		if e.signed {
			return json.Number(strconv.FormatInt(int64(e.key(k)), 10))
		}
		return json.Number(strconv.FormatUint(k, 10))
	}
	return format(e.low), format(e.high)
}

// decoderOf returns what turns elements into numbers.
func decoderOf(d tensor.DataType) func(to []float64, b []byte) {
	le := binary.LittleEndian
	each := func(width int, value func(b []byte) float64) func(to []float64, b []byte) {
		return func(to []float64, b []byte) {
			for i := range to {
				to[i] = value(b[i*width:])
			}
		}
	}
	if f, small := minifloat.Of(d); small {
		table := make([]float64, 1<<d.Bits()) // 512 KiB at most
		for bits := range table {
			table[bits] = f.Decode(uint16(bits))
		}
		if d.Bits() == 8 {
			return each(1, func(b []byte) float64 { return table[b[0]] })
		}
		return each(2, func(b []byte) float64 { return table[le.Uint16(b)] })
	}
	f32 := func(b []byte) float64 { return float64(math.Float32frombits(le.Uint32(b))) }
	f64 := func(b []byte) float64 { return math.Float64frombits(le.Uint64(b)) }
	switch d {
	case tensor.Bool:
		return each(1, func(b []byte) float64 { return float64(min(b[0], 1)) })
	case tensor.Int8:
		return each(1, func(b []byte) float64 { return float64(int8(b[0])) })
	case tensor.Uint8:
		return each(1, func(b []byte) float64 { return float64(b[0]) })
	case tensor.Int16:
		return each(2, func(b []byte) float64 { return float64(int16(le.Uint16(b))) })
	case tensor.Uint16:
		return each(2, func(b []byte) float64 { return float64(le.Uint16(b)) })
	case tensor.Int32:
		return each(4, func(b []byte) float64 { return float64(int32(le.Uint32(b))) })
	case tensor.Uint32:
		return each(4, func(b []byte) float64 { return float64(le.Uint32(b)) })
	case tensor.Int64:
		return each(8, func(b []byte) float64 { return float64(int64(le.Uint64(b))) })
	case tensor.Uint64:
		return each(8, func(b []byte) float64 { return float64(le.Uint64(b)) })
	case tensor.Float32:
		return each(4, f32)
	case tensor.Float64:
		return each(8, f64)
	case tensor.Complex64:
		return each(8, func(b []byte) float64 { return magnitude(f32(b), f32(b[4:])) })
	default:
		return each(16, func(b []byte) float64 { return magnitude(f64(b), f64(b[8:])) })
	}
}

// magnitude is NaN if one part is, where math.Hypot prefers the infinity of the
// other. One beyond float64 counts as infinite.
func magnitude(re, im float64) float64 {
	if re != re || im != im {
		return math.NaN()
	}
	return math.Hypot(re, im)
}
