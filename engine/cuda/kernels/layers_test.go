package kernels

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/minifloat"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// normal returns normally distributed numbers.
func normal(r *rand.Rand, n int) []float32 {
	xs := make([]float32, n)
	for i := range xs {
		xs[i] = float32(r.NormFloat64())
	}
	return xs
}

// halves are the small data types.
var halves = map[Float]tensor.DataType{F16: tensor.Float16, BF16: tensor.BFloat16}

func testConvert(t *testing.T, h host) {
	for half, dtype := range halves {
		format, _ := minifloat.Of(dtype)
		all := make([]uint16, 1<<16)
		for i := range all {
			all[i] = uint16(i)
		}
		wide := make([]float32, len(all))
		h.run(t, Convert{Dst: 0, Src: 1, N: N(len(all)), To: F32, From: half}, 0, wide, all)
		for i, v := range wide {
			require.True(t, same(float64(format.Values()[all[i]]), float64(v)), "%v %#x is %v", dtype, i, v)
		}
		// The bounds between two neighbors, what is beside them, and all sizes.
		xs := slices.Concat(wide, sample(t))
		for i := range all[:len(all)-1] {
			mid := float32((float64(wide[i]) + float64(wide[i+1])) / 2)
			xs = append(xs, mid, math.Nextafter32(mid, 0), math.Nextafter32(mid, 2*mid))
		}
		xs = append(xs, 65519.996, 65520, math.Nextafter32(math.MaxFloat32, 0))
		got := make([]uint16, len(xs))
		h.run(t, Convert{Dst: 0, Src: 1, N: N(len(xs)), To: half, From: F32}, 0, got, xs)
		for i, x := range xs {
			if want := format.Encode(float64(x)); got[i] != want && !(x != x && math.IsNaN(float64(format.Values()[got[i]]))) {
				t.Fatalf("%v of %v (%x) is %#x, wanted %#x", dtype, x, x, got[i], want)
			}
		}
	}
	xs := []float64{0, 1 + 0x1p-24, 1 + 0x1.8p-23, -1e-46, 1e300, math.NaN(), math.Inf(-1), 0x1p-149}
	narrow, again := make([]float32, len(xs)), make([]float64, len(xs))
	h.run(t, Convert{Dst: 0, Src: 1, N: N(len(xs)), To: F32, From: F64}, 1, narrow, xs)
	h.run(t, Convert{Dst: 0, Src: 1, N: N(len(xs)), To: F64, From: F32}, 1, again, narrow)
	for i, x := range xs {
		require.True(t, same(float64(float32(x)), again[i]), "%v is %v", x, again[i])
	}
}

// testHalfWeights is testLinear for weights of small data types.
func testHalfWeights(t *testing.T, h host) {
	r := testkit.Rand(t)
	const rows, in, out = 3, 21, 70
	x, w, bias := normal(r, rows*in), normal(r, out*in), normal(r, out)
	for half := range halves {
		bits, rounded := make([]uint16, len(w)), make([]float32, len(w))
		h.run(t, Convert{Dst: 0, Src: 1, N: out * in, To: half, From: F32}, 0, bits, w)
		h.run(t, Convert{Dst: 0, Src: 1, N: out * in, To: F32, From: half}, 0, rounded, bits)
		l := LinearF32{X: 0, W: 1, Bias: 2, Y: 3, Rows: rows, In: in, Out: out, Activation: GELU}
		want, got := make([]float32, rows*out), make([]float32, rows*out)
		h.run(t, l, 0, x, rounded, bias, want)
		l.Type = half
		h.run(t, l, 0, x, bits, bias, got)
		requireBits(t, want, got)
	}
}

// same tells 0 from -0, and no NaN from another.
func same(a, b float64) bool {
	return a != a && b != b || math.Float64bits(a) == math.Float64bits(b)
}

// shapes are rows and widths about those of a team, and of a block.
var shapes = [][2]int{{1, 1}, {7, 5}, {8, 31}, {9, 33}, {17, 100}, {2, 4096}, {3, 4097}}

func testNorm(t *testing.T, h host) {
	r := testkit.Rand(t)
	for _, s := range shapes {
		rows, width := s[0], s[1]
		for centered, eps := range map[uint32]float64{0: 1e-6, 1: 1e-5} {
			x, weight, bias := normal(r, rows*width), normal(r, width), normal(r, width)
			for i := range x {
				x[i] += 10 // so that a mean matters
			}
			for _, gridX := range []uint32{0, 1} {
				y := slices.Clone(x)
				h.run(t, NormF32{X: 0, Weight: 1, Bias: 2, Rows: uint64(rows), Width: uint32(width), Centered: centered, Eps: eps}, gridX, y, weight, bias)
				for row := range slices.Chunk(x, width) {
					requireNorm(t, y[:width], row, weight, bias, eps, centered == 1)
					y = y[width:]
				}
			}
		}
	}
}

// requireNorm compares y with engine/cpu's formula of x.
func requireNorm(t *testing.T, y, x, weight, bias []float32, eps float64, centered bool) {
	var mean, squares float64
	for _, v := range x {
		if centered {
			mean += float64(v) / float64(len(x))
		}
	}
	for _, v := range x {
		squares += (float64(v) - mean) * (float64(v) - mean)
	}
	scale := 1 / math.Sqrt(squares/float64(len(x))+eps)
	for i, v := range x {
		want := (float64(v)-mean)*scale*float64(weight[i]) + float64(bias[i])
		require.InDelta(t, want, y[i], math.Abs(want)*0x1p-23+1e-12, "element %d of %d", i, len(x))
	}
}

func testSoftmax(t *testing.T, h host) {
	r := testkit.Rand(t)
	worst := 0.0
	check := func(x []float32, rows, width int, gridX uint32) {
		y := slices.Clone(x)
		h.run(t, SoftmaxF32{X: 0, Rows: uint64(rows), Width: uint32(width)}, gridX, y)
		for row := range slices.Chunk(x, width) {
			top, sum := math.Inf(-1), 0.0
			for _, v := range row {
				top = max(top, float64(v))
			}
			for _, v := range row {
				sum += math.Exp(float64(v) - top)
			}
			for i, v := range row {
				want := math.Exp(float64(v)-top) / sum
				off := units(y[i], want)
				require.LessOrEqual(t, off, 4.0, "softmax of %v below %v is %v, wanted %v", v, top, y[i], want)
				worst = max(worst, off)
			}
			y = y[width:]
		}
	}
	for _, s := range shapes {
		for _, gridX := range []uint32{0, 1} {
			x := normal(r, s[0]*s[1])
			for i := range x {
				x[i] *= 20
			}
			check(x, s[0], s[1], gridX)
		}
	}
	// Pairs: every size of a difference, and exceptions.
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	pairs := []float32{inf, 1, -inf, 1, -inf, -inf, nan, 1, 1, nan, inf, inf, math.MaxFloat32, -math.MaxFloat32, 0, float32(math.Copysign(0, -1))}
	for range 5_000 {
		top := float32(r.NormFloat64() * 1000)
		pairs = append(pairs, top, top-float32(r.ExpFloat64()*30))
	}
	check(pairs, len(pairs)/2, 2, 0)
	t.Logf("at most %.2f units", worst)
}

func testGate(t *testing.T, h host) {
	r := testkit.Rand(t)
	const rows, width = 30, 70
	x := normal(r, rows*2*width)
	for a := None; a <= Sigmoid; a++ {
		active := slices.Clone(x)
		h.run(t, ActivateF32{N: N(len(x)), Activation: a}, 0, active)
		want := make([]float32, rows*width)
		for i := range want {
			at := i/width*2*width + i%width
			want[i] = active[at] * x[at+width]
		}
		for _, gridX := range []uint32{0, 1} {
			y := make([]float32, len(want))
			h.run(t, GateF32{Y: 0, X: 1, N: N(len(y)), Width: width, Activation: a}, gridX, y, x)
			requireBits(t, want, y)
		}
	}
}

func testEmbed(t *testing.T, h host) {
	r := testkit.Rand(t)
	const vocabulary, width = 50, 33
	weight := normal(r, vocabulary*width)
	var narrow []int32
	var wide []int64
	for range 21 {
		id := r.Int32N(vocabulary)
		narrow, wide = append(narrow, id), append(wide, int64(id))
	}
	for f, dtype := range map[Float]tensor.DataType{F32: tensor.Float32, F16: tensor.Float16, BF16: tensor.BFloat16} {
		table, values := any(weight), slices.Clone(weight)
		if format, small := minifloat.Of(dtype); small {
			bits := make([]uint16, len(weight))
			for i, v := range weight {
				bits[i] = format.Encode(float64(v))
				values[i] = format.Values()[bits[i]]
			}
			table = bits
		}
		for _, ids := range []any{narrow, wide} {
			want := make([]float32, len(narrow)*width)
			for i := range want {
				want[i] = values[int(narrow[i/width])*width+i%width]
			}
			_, long := ids.([]int64)
			l := EmbedF32{Y: 0, IDs: 1, Weight: 2, N: N(len(want)), Width: width, Wide: uint32(b2i(long)), Type: f}
			for _, gridX := range []uint32{0, 1} {
				y := make([]float32, len(want))
				h.run(t, l, gridX, y, ids, table)
				requireBits(t, want, y)
			}
		}
	}
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

func testAttention(t *testing.T, h host) {
	r := testkit.Rand(t)
	for _, s := range []struct{ items, positions, heads, size int }{
		{1, 1, 1, 1}, {3, 5, 2, 3}, {1, 63, 1, 16}, {2, 64, 2, 17}, {1, 65, 1, 64}, {1, 130, 1, 65}, {1, 70, 1, 130},
	} {
		width := s.heads * s.size
		qkv := normal(r, s.items*s.positions*3*width)
		mask := make([]uint8, s.items*s.positions)
		for i := range mask {
			mask[i] = uint8(b2i(r.IntN(3) > 0))
		}
		for i := range s.positions {
			mask[i] &= uint8(b2i(s.items == 1 || i > 2)) // who comes first in an item may see none
		}
		scale := float32(1 / math.Sqrt(float64(s.size)))
		for causal := range uint32(2) {
			for masked := range Address(2) {
				t.Run(fmt.Sprint(s, causal, masked), func(t *testing.T) {
					sees := func(item, query, key int) bool {
						return !(causal == 1 && key > query) && !(masked == 1 && mask[item*s.positions+key] == 0)
					}
					in := slices.Clone(qkv)
					if masked == 1 { // what is hidden may be anything
						for i, there := range mask {
							for j := range width {
								if there == 0 {
									in[i*3*width+width+j], in[i*3*width+2*width+j] = float32(math.NaN()), float32(math.Inf(1))
								}
							}
						}
					}
					last := s.positions - 1
					if causal == 1 && last > 0 { // nor is what is later seen
						in[last*3*width+width], in[last*3*width+2*width] = float32(math.NaN()), float32(math.Inf(1))
					}
					l := AttentionF32{QKV: 0, Mask: masked, Y: 2, Items: uint64(s.items), Positions: uint32(s.positions), Width: uint32(width), Heads: uint32(s.heads), Causal: causal, Scale: scale}
					var first []float32
					for _, gridX := range []uint32{0, 1} {
						y := make([]float32, s.items*s.positions*width)
						h.run(t, l, gridX, in, mask, y)
						if first != nil {
							requireBits(t, first, y)
							continue
						}
						first = y
						want := attention(qkv, s.items, s.positions, s.heads, s.size, sees)
						for i := range want {
							if causal == 1 && last > 0 && i/width == last {
								continue // it sees itself
							}
							require.InDelta(t, want[i], y[i], 4e-6, "element %d", i)
						}
					}
				})
			}
		}
	}
}

// attention is the formula, in float64.
func attention(qkv []float32, items, positions, heads, size int, sees func(item, query, key int) bool) []float64 {
	width := heads * size
	at := func(item, position, part, column int) float64 {
		return float64(qkv[(item*positions+position)*3*width+part*width+column])
	}
	y := make([]float64, items*positions*width)
	for item := range items {
		for head := range heads {
			for query := range positions {
				weights, sum := make([]float64, positions), 0.0
				for key := range positions {
					if !sees(item, query, key) {
						continue
					}
					var score float64
					for c := head * size; c < (head+1)*size; c++ {
						score += at(item, query, 0, c) * at(item, key, 1, c)
					}
					weights[key] = math.Exp(score / math.Sqrt(float64(size)))
					sum += weights[key]
				}
				for key, w := range weights {
					for c := head * size; w > 0 && c < (head+1)*size; c++ {
						y[(item*positions+query)*width+c] += w / sum * at(item, key, 2, c)
					}
				}
			}
		}
	}
	return y
}
