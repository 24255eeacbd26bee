package elements

import (
	"encoding/json"
	"io"
	"math"
	"strconv"

	"github.com/tensorferry/tensorferry/tensor"
)

// block is how many elements are summarized together: at most 64 KiB of them, and as many
// float64, stay in a processor's cache.
const block = 4096

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

// Summarize summarizes the tensor whose bytes r yields, and reads no byte more. If r ends
// early, the error wraps io.ErrUnexpectedEOF.
func Summarize(r io.Reader, d tensor.Desc) (*Summary, error) {
	size, err := d.Bytes()
	if err != nil {
		return nil, err
	}
	number, width := numberOf(d.DType), d.DType.Bits()/8
	s := &Summary{Elements: size / int64(width), low: math.Inf(1), high: math.Inf(-1), whole: d.DType.Whole()}
	s.bins.exp = leastBin
	if s.whole {
		s.bins.exp = 0
	}
	var m moments
	// A float64 would round the extremes of 64-bit integers: they are kept as keys, whose
	// order is that of the integers.
	least, most, flip := uint64(math.MaxUint64), uint64(0), uint64(0)
	if d.DType == tensor.Int64 {
		flip = 1 << 63
	}
	wide := s.whole && width == 8
	buf, values := make([]byte, block*width), make([]float64, block)
	for at := int64(0); at < size; {
		b := buf[:min(int64(len(buf)), size-at)]
		if err := fill(b, r, at, size); err != nil {
			return nil, err
		}
		at += int64(len(b))
		all := values[:len(b)/width]
		for i := range all {
			all[i] = number(b[i*width:])
		}
		for i := 0; wide && i < len(b); i += 8 {
			key := le.Uint64(b[i:]) ^ flip
			least, most = min(least, key), max(most, key)
		}
		s.add(all, &m)
	}
	if s.finite == 0 {
		return s, nil
	}
	s.Mean = min(max(math.Ldexp(m.mean, m.exp), s.low), s.high) // rounding shall not lead out
	s.Std = math.Ldexp(math.Sqrt(m.squares/m.n), m.exp)
	if wide {
		text := func(key uint64) json.Number { return json.Number(Text(d.DType, le.AppendUint64(nil, key^flip))) }
		s.Min, s.Max = text(least), text(most)
		return s, nil
	}
	bits := precision(d.DType)
	if paired(d.DType) { // a magnitude
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

// magnitude is NaN if one part is, where math.Hypot prefers the infinity of the
// other. One beyond float64 counts as infinite.
func magnitude(re, im float64) float64 {
	if re != re || im != im {
		return math.NaN()
	}
	return math.Hypot(re, im)
}
