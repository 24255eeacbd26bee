package tensor

import (
	"errors"
	"fmt"
	"math"
	"testing"
)

// Every chunk of every small tensor, against counting bytes one by one.
func TestChunksCoverEveryByteOnce(t *testing.T) {
	for _, c := range []int64{1, 2, 7, 1024, 1025, 16383, 16384, 16385} {
		for _, size := range []int64{0, 1, c - 1, c, c + 1, 2 * c, 2*c + 1} {
			t.Run(fmt.Sprintf("size=%d,chunk=%d", size, c), func(t *testing.T) {
				g, err := NewGeometry(size, c)
				if err != nil {
					t.Fatal(err)
				}
				var end int64
				for i := range g.Count() {
					off, n := g.Span(i)
					last := i == g.Count()-1
					if off != end || n > c || (!last && n != c) || (last && n == 0 && size > 0) {
						t.Fatalf("chunk %d is [%d,+%d) after byte %d", i, off, n, end)
					}
					end = off + n
					if got := g.Below(end); got != i+1 {
						t.Errorf("%d chunks lie below byte %d, want %d", got, end, i+1)
					}
					if n > 1 && g.Below(end-1) != i {
						t.Errorf("%d chunks lie below byte %d, want %d", g.Below(end-1), end-1, i)
					}
				}
				if end != size {
					t.Errorf("the chunks end at byte %d", end)
				}
			})
		}
	}
}

func TestGeometryRefusesWhatCannotBeCounted(t *testing.T) {
	for name, tc := range map[string]struct {
		size, chunk int64
		count       uint32
		err         error
	}{
		"nothing":              {0, 1, 1, nil},
		"negative size":        {-1, 1, 0, ErrShape},
		"no chunk size":        {1, 0, 0, ErrShape},
		"no chunk size, empty": {0, 0, 0, ErrShape},
		"negative chunk size":  {1, -1, 0, ErrShape},
		"most chunks":          {MaxChunks, 1, MaxChunks, nil},
		"one too many":         {MaxChunks + 1, 1, 0, ErrTooLarge},
		"a byte too many":      {MaxChunks*7 + 1, 7, 0, ErrTooLarge},
		"largest tensor":       {math.MaxInt64, math.MaxInt64, 1, nil},
		"largest, byte by byte": {
			math.MaxInt64, 1, 0, ErrTooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			g, err := NewGeometry(tc.size, tc.chunk)
			if !errors.Is(err, tc.err) || (err == nil && g.Count() != tc.count) {
				t.Errorf("got %v, %v; want %d, %v", g, err, tc.count, tc.err)
			}
		})
	}
	g, err := NewGeometry(math.MaxInt64, math.MaxInt64-1)
	if err != nil {
		t.Fatal(err)
	}
	if off, n := g.Span(1); off != math.MaxInt64-1 || n != 1 {
		t.Errorf("last chunk is [%d,+%d)", off, n)
	}
}

func TestChunkForTakesWholeRowsWhereTheyFit(t *testing.T) {
	for name, tc := range map[string]struct {
		desc  Desc
		limit int64
		want  int64
	}{
		"rows divide the limit":   {Desc{Float32, Shape{1000, 256}}, 4096, 4096},
		"rows do not":             {Desc{Float32, Shape{1000, 300}}, 4096, 3600},
		"a row is the limit":      {Desc{Float32, Shape{10, 1024}}, 4096, 4096},
		"a row is over the limit": {Desc{Float32, Shape{10, 1025}}, 4096, 4096},
		"inner rows fit":          {Desc{Float32, Shape{10, 1000, 3}}, 4096, 4092},
		"outermost rows that fit": {Desc{Uint8, Shape{10, 3, 100}}, 1000, 900},
		"vector":                  {Desc{Float64, Shape{1 << 20}}, 4097, 4096},
		"scalar":                  {Desc{Float64, nil}, 4096, 4096},
		"zero rows":               {Desc{Float32, Shape{0, 256}}, 4096, 4096},
		"empty rows":              {Desc{Float32, Shape{5, 0}}, 4096, 4096},
		"an element is too wide":  {Desc{Complex128, Shape{5}}, 15, 1},
		"rows past 2^63":          {Desc{Uint8, Shape{1, MaxDim, MaxDim}}, math.MaxInt64, math.MaxInt64 / MaxDim * MaxDim},
	} {
		t.Run(name, func(t *testing.T) {
			if got := ChunkFor(tc.desc, tc.limit); got != tc.want {
				t.Errorf("got %d, want %d", got, tc.want)
			}
		})
	}
}
