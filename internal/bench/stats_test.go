package bench

import (
	"math"
	"math/big"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func near(a, b float64) bool { return math.Abs(a-b) < 1e-9 }

func TestSpreadFindsMedianAndError(t *testing.T) {
	for name, tc := range map[string]struct {
		values []float64
		want   Spread
	}{
		"one":                  {[]float64{2}, Spread{2, 0, 1}},
		"two":                  {[]float64{3, 1}, Spread{2, 0.5, 2}},
		"five span their all":  {[]float64{5, 4, 3, 2, 1}, Spread{3, 2. / 3, 5}},
		"nine without the two": {[]float64{90, 20, 30, 40, 50, 60, 70, 80, 1}, Spread{50, 0.6, 9}},
		"all the same":         {[]float64{7, 7, 7, 7, 7, 7, 7}, Spread{7, 0, 7}},
	} {
		t.Run(name, func(t *testing.T) {
			before := slices.Clone(tc.values)
			got := NewSpread(tc.values)
			if !near(got.Median, tc.want.Median) || !near(got.Error, tc.want.Error) || got.N != tc.want.N {
				t.Errorf("got %+v, want %+v", got, tc.want)
			}
			if !slices.Equal(tc.values, before) {
				t.Error("the values were put in order")
			}
		})
	}
}

func TestQuantileLiesBetweenItsNeighbors(t *testing.T) {
	for _, tc := range []struct {
		q    float64
		want time.Duration
	}{{0, 10}, {0.25, 20}, {0.5, 30}, {0.625, 35}, {0.99, 49}, {1, 50}} {
		if got := Quantile([]time.Duration{50, 10, 40, 20, 30}, tc.q); got != tc.want {
			t.Errorf("quantile %v is %d, want %d", tc.q, got, tc.want)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		values := rapid.SliceOfN(rapid.Int64Range(-1000, 1000), 1, 40).Draw(t, "values")
		q := rapid.Float64Range(0, 1).Draw(t, "q")
		got := Quantile(values, q)
		below, above := 0, 0
		for _, v := range values {
			if v < got {
				below++
			}
			if v > got {
				above++
			}
		}
		n := float64(len(values))
		if float64(below) > q*(n-1)+1 || float64(above) > (1-q)*(n-1)+1 {
			t.Fatalf("%d of %v are below %d and %d above, for %v", below, values, got, above, q)
		}
	})
}

// outside is, exactly, the probability that the median is not between the k-th
// smallest and the k-th largest of n values, counted from 0.
func outside(n, k int) *big.Rat {
	sum := new(big.Int)
	for i := range k + 1 {
		sum.Add(sum, new(big.Int).Binomial(int64(n), int64(i)))
	}
	return new(big.Rat).SetFrac(sum.Lsh(sum, 1), new(big.Int).Lsh(big.NewInt(1), uint(n)))
}

func TestMedianRankEnclosesTheMedianNineteenTimesOfTwenty(t *testing.T) {
	twentieth := big.NewRat(1, 20)
	for n := 1; n <= 200; n++ {
		k := medianRank(n)
		if n >= 6 && outside(n, k).Cmp(twentieth) > 0 {
			t.Errorf("with %d values, rank %d misses too often", n, k)
		}
		if outside(n, k+1).Cmp(twentieth) <= 0 {
			t.Errorf("with %d values, rank %d would do, got %d", n, k+1, k)
		}
		if 2*k >= n {
			t.Errorf("with %d values, rank %d is beyond the middle", n, k)
		}
	}
}
