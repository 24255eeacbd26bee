package elements

import "math"

const (
	// binCount is how many bins there are: each of the columns that a histogram is
	// shown in, some 40, then has 200 or more, so its edges are off by 0.5 % or less.
	binCount = 1 << 14
	// leastBin is the exponent of the narrowest bin's width: its inverse is finite.
	leastBin = -1000
)

// histogram counts numbers in bins of one width, a power of two, which doubles as
// often as it must for all numbers to find a bin. So one pass is enough, and in the
// end more than half of the bins lie between the least and the most, unless the
// numbers have too few bits for that.
type histogram struct {
	exp  int   // a bin is 2^exp wide
	base int64 // the first bin begins at base*2^exp
	bins []int64
}

// bin returns the number of v's bin, counted from the one that begins at 0.
func bin(v float64, exp int) int64 { return int64(math.Floor(v * math.Ldexp(1, -exp))) }

// cover makes bins for all of [low, high], which never shrinks.
func (h *histogram) cover(low, high float64) {
	_, most := math.Frexp(max(math.Abs(low), math.Abs(high)))
	exp := max(h.exp, most-53) // so that the number of a bin is exact
	for bin(high, exp)-bin(low, exp) >= binCount {
		exp++
	}
	first, last := bin(low, exp), bin(high, exp)
	switch wider := exp - h.exp; {
	case h.bins == nil:
		h.bins, h.base = make([]int64, binCount), first
	case wider == 0 && h.base <= first && last-h.base < binCount:
	default:
		base := first
		if first < h.base>>wider {
			base = last - binCount + 1 // it grew downwards: leave room there
		}
		old := h.bins
		h.bins = make([]int64, binCount)
		for i, n := range old {
			if n > 0 {
				h.bins[(h.base+int64(i))>>wider-base] += n
			}
		}
		h.base = base
	}
	h.exp = exp
}

// add counts numbers that lie where there are bins.
func (h *histogram) add(values []float64) {
	scale := math.Ldexp(1, -h.exp)
	for _, v := range values {
		h.bins[int64(math.Floor(v*scale))-h.base]++
	}
}

// Histogram is how many elements lie in each of some columns of one width.
type Histogram struct {
	// Low is where the first column begins, High where the last one ends: at Max,
	// which counts there; of integers beyond it.
	Low    float64 `json:"low"`
	High   float64 `json:"high"`
	Counts []int64 `json:"counts"`
}

// Histogram copies the finite elements' histogram in at most columns columns. Of
// integers each stands for as many values; a single one where all elements are
// equal; none if no element is finite. An element may be counted in the column
// beside its own if it is within 0.5 % of a column's width of the edge.
func (s *Summary) Histogram(columns int) Histogram {
	h := Histogram{Low: s.low, High: s.high}
	if s.finite == 0 {
		return Histogram{}
	}
	switch {
	case s.whole:
		values := s.high - s.low + 1
		each := math.Ceil(values / float64(columns))
		columns = int(math.Ceil(values / each))
		h.High = s.low + each*float64(columns)
	case s.low == s.high:
		columns = 1
	}
	h.Counts = make([]int64, columns)
	for i, n := range s.bins.bins {
		if n == 0 {
			continue
		}
		middle := math.Ldexp(float64(s.bins.base+int64(i))+0.5, s.bins.exp)
		at := 0.0
		if h.High > h.Low { // in halves: their difference is finite
			at = (middle/2 - h.Low/2) / (h.High/2 - h.Low/2)
		}
		h.Counts[min(max(int(at*float64(columns)), 0), columns-1)] += n
	}
	return h
}
