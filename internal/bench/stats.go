package bench

import (
	"fmt"
	"math"
	"slices"
)

// Spread is where the values of a sample lie.
type Spread struct {
	Median float64 `json:"median"`
	// Error is how far the true median may be from Median, as a part of it: half
	// the width of an interval that holds it in 95 of 100 samples, whatever the
	// distribution. With fewer than 6 values, half of all they span.
	Error float64 `json:"error"`
	N     int     `json:"n"`
}

// String returns such as "0.95  ±3.1 %", with a tab between.
func (s Spread) String() string {
	if s.N == 0 {
		return "–\t"
	}
	return fmt.Sprintf("%.2f\t±%.1f %%", s.Median, 100*s.Error)
}

// NewSpread describes at least one value, which it copies.
func NewSpread(values []float64) Spread {
	s := slices.Clone(values)
	m := Quantile(s, 0.5) // which sorts
	k := medianRank(len(s))
	e := math.Abs((s[len(s)-1-k] - s[k]) / 2 / m)
	return Spread{Median: m, Error: e, N: len(s)}
}

// Quantile returns the value that the part q of the values does not exceed,
// between two of them where it falls there. It sorts them.
func Quantile[T ~int64 | ~float64](values []T, q float64) T {
	slices.Sort(values)
	at := q * float64(len(values)-1)
	i := int(at)
	if i+1 >= len(values) {
		return values[len(values)-1]
	}
	return values[i] + T(float64(values[i+1]-values[i])*(at-float64(i)))
}

// medianRank returns the largest k such that the k-th smallest and the k-th
// largest of n values, counted from 0, enclose the true median with a
// probability of 95 % or more. A value is below the median with probability ½,
// so the number of those below is binomial: 2·P(at most k of n) is the
// probability that it lies outside.
func medianRank(n int) int {
	p := math.Pow(0.5, float64(n)) // of exactly 0 of n
	outside := 0.0
	for k := 0; ; k++ {
		if outside += 2 * p; outside > 0.05 {
			return max(k-1, 0)
		}
		p *= float64(n-k) / float64(k+1)
	}
}
