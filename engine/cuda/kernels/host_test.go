package kernels

import (
	"bytes"
	"encoding/binary"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/testkit"
)

// TestKernelsComputeOnAHostWhatTheySay runs the source as a C++ compiler understands
// it. Whether a GPU computes the same bits is for the tests of engine/cuda to find.
func TestKernelsComputeOnAHostWhatTheySay(t *testing.T) {
	compiler, err := exec.LookPath("g++")
	if err != nil || runtime.GOOS != "linux" {
		t.Skip("no g++ on Linux here to run the kernels on the host")
	}
	for _, name := range append([]string{"testdata/harness.cpp"}, sources...) {
		_, err := os.Stat(name) // or go test's cache would not notice that it has changed
		require.NoError(t, err)
	}
	h := host(filepath.Join(t.TempDir(), "harness"))
	args := []string{"-x", "c++", "-O2", "-ffp-contract=off", "-o", string(h), "testdata/harness.cpp"}
	if out, err := exec.CommandContext(t.Context(), compiler, args...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for name, test := range map[string]func(*testing.T, host){
		"an activation is within its bound of engine/cpu's formula":  testActivations,
		"linear adds products in order, whatever the tiles":          testLinear,
		"linear takes weights of float16 and bfloat16":               testHalfWeights,
		"linear keeps a sum of -0":                                   testNegativeZero,
		"relu is max(x, 0) for every data type":                      testReLU,
		"arithmetic has the bits of engine/cpu, whatever the grid":   testArithmetic,
		"a float is converted as package minifloat does":             testConvert,
		"a norm is within a unit of engine/cpu's formula":            testNorm,
		"softmax is within 4 units of engine/cpu's formula":          testSoftmax,
		"a gate is an activation of one half times the other":        testGate,
		"embed copies rows, and adds those of positions":             testEmbed,
		"attention is near its formula, whatever the tiles":          testAttention,
		"a kernel without elements leaves its neighbors as they are": testNothing,
	} {
		t.Run(name, func(t *testing.T) { test(t, h) })
	}
}

// entryOf returns the kernel that a launch is of.
func entryOf(l Launch) string {
	for entry, empty := range All() {
		if reflect.TypeOf(empty) == reflect.TypeOf(l) {
			return entry
		}
	}
	panic("no kernel")
}

// host is a program that runs kernels, testdata/harness.cpp.
type host string

// run runs a launch whose addresses are numbers of buffers, each a slice of numbers,
// and stores what they hold then. The grid is the launch's, or one of so many blocks.
func (h host) run(t *testing.T, l Launch, gridX uint32, buffers ...any) {
	t.Helper()
	grid, block := l.Grid()
	if gridX > 0 {
		grid = [3]uint32{gridX, 1, 1}
	}
	args := []string{entryOf(l)}
	for _, n := range []uint32{grid[0], grid[1], block[0]} {
		args = append(args, strconv.FormatUint(uint64(n), 10))
	}
	for _, f := range reflect.ValueOf(l).Fields() {
		var bits uint64
		switch f.Kind() {
		case reflect.Float32:
			bits = uint64(math.Float32bits(float32(f.Float())))
		case reflect.Float64:
			bits = math.Float64bits(f.Float())
		default:
			bits = f.Uint()
		}
		args = append(args, strconv.FormatUint(bits, 10))
	}
	var in, stderr bytes.Buffer
	for _, b := range buffers {
		require.NoError(t, binary.Write(&in, binary.LittleEndian, uint64(binary.Size(b))))
		require.NoError(t, binary.Write(&in, binary.LittleEndian, b))
	}
	cmd := exec.CommandContext(t.Context(), string(h), args...)
	cmd.Stdin, cmd.Stderr = &in, &stderr
	out, err := cmd.Output()
	require.NoError(t, err, "%v: %s", args, &stderr)
	for _, b := range buffers {
		n, err := binary.Decode(out[8:], binary.LittleEndian, b)
		require.NoError(t, err)
		out = out[8+n:]
	}
	require.Empty(t, out)
}

// sample has every sign and exponent with random fractions, every exception, the edges
// of what the activations treat alike, and many numbers of usual size.
func sample(t *testing.T) []float32 {
	r := testkit.Rand(t)
	inf := float32(math.Inf(1))
	xs := []float32{0, inf, float32(math.NaN()), math.MaxFloat32, math.SmallestNonzeroFloat32}
	for _, x := range []float32{0x1p-126, 1, 12, 15, 120} {
		xs = append(xs, x, math.Nextafter32(x, 0), math.Nextafter32(x, inf))
	}
	for exponent := range uint32(255) {
		for range 1000 {
			xs = append(xs, math.Float32frombits(exponent<<23|r.Uint32()>>9))
		}
	}
	for range 500_000 {
		xs = append(xs, r.Float32()*16, r.Float32()*128)
	}
	for _, x := range xs {
		xs = append(xs, -x)
	}
	return xs
}

// activations are what engine/cpu computes, and how far the kernels may be from it.
var activations = map[Activation]struct {
	f     func(x float64) float64
	units float64
}{
	None: {func(x float64) float64 { return x }, 0},
	ReLU: {func(x float64) float64 { return max(x, 0) }, 0},
	GELU: {func(x float64) float64 { return x * math.Erfc(-x/math.Sqrt2) / 2 }, 6},
	GELUTanh: {func(x float64) float64 {
		return x / (1 + math.Exp(-2*math.Sqrt(2/math.Pi)*(x+0.044715*x*x*x)))
	}, 4},
	SiLU:    {func(x float64) float64 { return x / (1 + math.Exp(-x)) }, 4},
	Sigmoid: {func(x float64) float64 { return 1 / (1 + math.Exp(-x)) }, 4},
}

func testActivations(t *testing.T, h host) {
	xs := sample(t)
	for a := None; a <= Sigmoid; a++ {
		ys := append([]float32(nil), xs...)
		h.run(t, ActivateF32{N: N(len(ys)), Activation: a}, 0, ys)
		worst, at := 0.0, float32(0)
		for i, x := range xs {
			want := activations[a].f(float64(x))
			off := units(ys[i], want)
			if off > activations[a].units || math.IsNaN(off) {
				t.Fatalf("activation %d of %v (%x) is %v (%x), wanted %v: %v units", a, x, x, ys[i], ys[i], want, off)
			}
			if off > worst {
				worst, at = off, x
			}
		}
		t.Logf("activation %d: at most %.2f units, at %v", a, worst, at)
	}
}

// units is how far got is from want in units of want's last place as a float32; NaN for
// what is not to be measured in units, such as a wrong sign of zero.
func units(got float32, want float64) float64 {
	rounded := float32(want)
	switch {
	case math.Float32bits(got) == math.Float32bits(rounded) && float64(rounded) == want || got != got && want != want:
		return 0
	case math.Signbit(float64(got)) != math.Signbit(want) || math.IsInf(want, 0) || want != want:
		return math.NaN()
	}
	_, exponent := math.Frexp(want)
	return math.Abs(float64(got)-want) / math.Ldexp(1, max(exponent, -125)-24)
}

func testLinear(t *testing.T, h host) {
	r := testkit.Rand(t)
	random := func(n uint64) []float32 { return normal(r, int(n)) }
	for name, tc := range map[string]struct {
		rows       uint64
		in, out    uint32
		activation Activation
	}{
		"one of each":             {1, 1, 1, None},
		"no input":                {2, 0, 3, None},
		"a tile":                  {64, 16, 64, None},
		"less than a tile":        {63, 15, 63, SiLU},
		"more than a tile":        {65, 17, 65, GELU},
		"several tiles each way":  {130, 49, 193, GELUTanh},
		"one row of many outputs": {1, 100, 129, ReLU},
	} {
		t.Run(name, func(t *testing.T) {
			in, out := uint64(tc.in), uint64(tc.out)
			x, w, bias := random(tc.rows*in), random(out*in), random(out)
			want := make([]float32, tc.rows*out)
			for i := range want {
				row, column := x[uint64(i)/out*in:], w[uint64(i)%out*in:]
				var sum float32
				exact, size := float64(bias[uint64(i)%out]), 0.0
				for k := range in {
					sum = fma(row[k], column[k], sum)
					exact += float64(row[k]) * float64(column[k])
					size += math.Abs(float64(row[k]) * float64(column[k]))
				}
				want[i] = sum + bias[uint64(i)%out]
				require.InDelta(t, exact, want[i], (size+math.Abs(exact))*float64(in+1)*0x1p-24)
			}
			h.run(t, ActivateF32{N: N(len(want)), Activation: tc.activation}, 0, want)
			l := LinearF32{X: 0, W: 1, Bias: 2, Y: 3, Rows: tc.rows, In: tc.in, Out: tc.out, Activation: tc.activation}
			for _, gridX := range []uint32{0, 1} {
				y := make([]float32, len(want)+1)
				h.run(t, l, gridX, x, w, bias, y)
				require.Zero(t, y[len(want)], "written behind the end")
				requireBits(t, want, y[:len(want)])
			}
		})
	}
}

// fma is x·y + z, rounded once: in float64 the product is exact, and a sum that is not
// is made odd, so that rounding it again does not round twice.
func fma(x, y, z float32) float32 {
	product := float64(x) * float64(y)
	sum := product + float64(z)
	part := sum - product
	rest := (product - (sum - part)) + (float64(z) - part)
	if bits := math.Float64bits(sum); rest != 0 && bits&1 == 0 {
		if (rest > 0) == (sum > 0) {
			sum = math.Float64frombits(bits + 1)
		} else {
			sum = math.Float64frombits(bits - 1)
		}
	}
	return float32(sum)
}

// A product too small for float32 makes a sum of -0; the inputs that a tile has more
// than the model must not turn it into 0.
func testNegativeZero(t *testing.T, h host) {
	zero := float32(math.Copysign(0, -1))
	y := []float32{1}
	h.run(t, LinearF32{X: 0, W: 1, Bias: 2, Y: 3, Rows: 1, In: 1, Out: 1}, 0, []float32{-1e-30}, []float32{1e-30}, []float32{zero}, y)
	requireBits(t, []float32{zero}, y)
}

func testReLU(t *testing.T, h host) {
	r := testkit.Rand(t)
	nan, inf := uint64(math.Float32bits(float32(math.NaN()))), uint64(0x7f80_0000)
	words := []uint64{
		0x8000_0000_0000_0000, 0x8000_8000_8000_8000, 0x8080_8080_8080_8080,
		nan | 1<<31 | inf<<32, inf | 1<<31 | nan<<32, math.Float64bits(math.NaN()) | 1<<63, math.Float64bits(math.Inf(-1)),
	}
	for range 1000 {
		words = append(words, r.Uint64())
	}
	for name, tc := range map[string]struct {
		bits, fraction uint // of an element; no fraction is an integer
	}{
		"int8": {8, 0}, "int16": {16, 0}, "int32": {32, 0}, "int64": {64, 0},
		"float16": {16, 10}, "bfloat16": {16, 7}, "float32": {32, 23}, "float64": {64, 52},
	} {
		t.Run(name, func(t *testing.T) {
			var least uint64 // magnitude that is NaN
			if tc.fraction > 0 {
				least = (1<<(tc.bits-1-tc.fraction)-1)<<tc.fraction + 1
			}
			l := ReLUWords{Words: uint64(len(words)), Shift: uint32(tc.bits - 1)}
			want := make([]uint64, len(words))
			for at := uint(0); at < 64; at += tc.bits {
				sign := uint64(1) << (tc.bits - 1)
				l.Sign |= sign << at
				if least > 0 {
					l.NaN |= (sign - least) << at
				}
				for i, word := range words {
					x := word >> at & (sign<<1 - 1)
					if x < sign || least > 0 && x&^sign >= least {
						want[i] |= x << at
					}
				}
			}
			for _, gridX := range []uint32{0, 1, 3} {
				got := append([]uint64(nil), words...)
				h.run(t, l, gridX, got)
				require.Equal(t, want, got)
			}
		})
	}
}

func testArithmetic(t *testing.T, h host) {
	r := testkit.Rand(t)
	const n = 2000
	x, y, x64 := make([]float32, n), make([]float32, n), make([]float64, n)
	for i := range n {
		x[i], y[i], x64[i] = float32(r.NormFloat64()), float32(r.NormFloat64()), r.NormFloat64()
	}
	inf, zero := float32(math.Inf(1)), float32(math.Copysign(0, -1))
	copy(x, []float32{0, zero, inf, -inf, math.MaxFloat32, math.SmallestNonzeroFloat32})
	for _, gridX := range []uint32{0, 1, 3} {
		each := func(l Launch, f func(i int) float32) {
			t.Helper()
			want, got := make([]float32, n), append([]float32(nil), x...)
			for i := range want {
				want[i] = f(i)
			}
			h.run(t, l, gridX, got, y)
			requireBits(t, want, got)
		}
		const a, b = 1.1, -0.3
		each(AffineF32{N: n, A: a, B: b}, func(i int) float32 { return float32(a*x[i]) + b })
		each(ScaleF32{N: n, Factor: a}, func(i int) float32 { return a * x[i] })
		each(AddF32{X: 0, Y: 1, N: n, Of: n}, func(i int) float32 { return x[i] + y[i] })
		each(AddF32{X: 0, Y: 1, N: n, Of: 7}, func(i int) float32 { return x[i] + y[i%7] })
		each(CopyF32{Dst: 0, Src: 1, N: n}, func(i int) float32 { return y[i] })

		want, got := make([]float64, n), append([]float64(nil), x64...)
		for i, x := range x64 {
			want[i] = float64(a*x) + b
		}
		h.run(t, AffineF64{N: n, A: a, B: b}, gridX, got)
		require.Equal(t, want, got)

		stored := []uint64{1, 2}
		h.run(t, StoreU64{V: 1<<64 - 1}, gridX, stored)
		require.Equal(t, []uint64{1<<64 - 1, 2}, stored)
	}
}

func testNothing(t *testing.T, h host) {
	for _, l := range All() {
		if _, stores := l.(StoreU64); stores {
			continue
		}
		data := []uint64{0xffff_ffff_8000_0001}
		h.run(t, l, 0, data)
		require.Equal(t, []uint64{0xffff_ffff_8000_0001}, data, entryOf(l))
	}
}

// requireBits tells 0 from -0.
func requireBits(t *testing.T, want, got []float32) {
	t.Helper()
	require.Len(t, got, len(want))
	for i := range want {
		if math.Float32bits(want[i]) != math.Float32bits(got[i]) {
			t.Fatalf("element %d is %v (%x), wanted %v (%x)", i, got[i], got[i], want[i], want[i])
		}
	}
}
