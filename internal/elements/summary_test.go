package elements

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
	"github.com/x448/float16"

	"github.com/tensorferry/tensorferry/tensor"
)

// element is the slow way to an element's value: as an exact number, or as what it
// is instead of one.
func element(d tensor.DataType, b []byte) (v *big.Float, odd float64) {
	number := func(v float64) (*big.Float, float64) {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return nil, v
		}
		return big.NewFloat(v), 0
	}
	switch d {
	case tensor.Bool:
		if b[0] != 0 {
			return number(1)
		}
		return number(0)
	case tensor.Int8:
		return number(float64(int8(b[0])))
	case tensor.Uint8:
		return number(float64(b[0]))
	case tensor.Int16:
		return number(float64(int16(le.Uint16(b))))
	case tensor.Uint16:
		return number(float64(le.Uint16(b)))
	case tensor.Int32:
		return number(float64(int32(le.Uint32(b))))
	case tensor.Uint32:
		return number(float64(le.Uint32(b)))
	case tensor.Int64:
		return new(big.Float).SetInt64(int64(le.Uint64(b))), 0
	case tensor.Uint64:
		return new(big.Float).SetUint64(le.Uint64(b)), 0
	case tensor.Float16:
		return number(float64(float16.Frombits(le.Uint16(b)).Float32()))
	case tensor.Float8E5M2: // the upper half of a float16
		return number(float64(float16.Frombits(uint16(b[0]) << 8).Float32()))
	case tensor.BFloat16:
		return number(float64(math.Float32frombits(uint32(le.Uint16(b)) << 16)))
	case tensor.Float8E4M3FN:
		if b[0]&0x7f == 0x7f {
			return number(math.NaN())
		}
		sign, exponent, mantissa := 1-2*float64(b[0]>>7), int(b[0]>>3&15), float64(b[0]&7)/8
		if exponent == 0 {
			return number(sign * math.Ldexp(mantissa, -6))
		}
		return number(sign * math.Ldexp(1+mantissa, exponent-7))
	case tensor.Float32:
		return number(float64(math.Float32frombits(le.Uint32(b))))
	case tensor.Float64:
		return number(math.Float64frombits(le.Uint64(b)))
	}
	part, width := tensor.Float32, 4
	if d == tensor.Complex128 {
		part, width = tensor.Float64, 8
	}
	re, odd := element(part, b[:width])
	im, odd2 := element(part, b[width:])
	if re == nil || im == nil {
		if math.IsNaN(odd) || math.IsNaN(odd2) {
			return number(math.NaN())
		}
		return number(math.Inf(1))
	}
	x, _ := re.Float64()
	y, _ := im.Float64()
	return number(math.Hypot(x, y))
}

// check holds a summary to the slow model: all elements at once, in numbers of 2200
// bits, which no difference of two float64 rounds.
func check(t *testing.T, d tensor.DataType, data []byte) {
	t.Helper()
	width := d.Bits() / 8
	n := len(data) / width
	data = data[:n*width]
	s, err := Summarize(bytes.NewReader(data), tensor.Desc{DType: d, Shape: tensor.Shape{int64(n)}})
	require.NoError(t, err)

	var nan, pos, neg, zeros int64
	var values []*big.Float
	for ; len(data) > 0; data = data[width:] {
		v, odd := element(d, data[:width])
		switch {
		case v != nil:
			values = append(values, v)
			if v.Sign() == 0 {
				zeros++
			}
		case math.IsNaN(odd):
			nan++
		case odd > 0:
			pos++
		default:
			neg++
		}
	}
	require.Equal(t, []int64{int64(n), nan, pos, neg, zeros}, []int64{s.Elements, s.NaN, s.PosInf, s.NegInf, s.Zeros})
	h := s.Histogram(40)
	if len(values) == 0 {
		require.Equal(t, [2]string{}, [2]string{string(s.Min), string(s.Max)})
		require.Zero(t, s.Mean)
		require.Zero(t, s.Std)
		require.Empty(t, h.Counts)
		return
	}
	slices.SortFunc(values, (*big.Float).Cmp)
	low, high := values[0], values[len(values)-1]
	same := func(want *big.Float, text string) {
		t.Helper()
		got, _, err := big.ParseFloat(text, 10, 64, big.ToNearestEven)
		require.NoError(t, err)
		if d.Bits() <= 32 {
			f, _ := want.Float32()
			g, _ := got.Float32()
			require.Equal(t, f+0, g+0, "%v", text) // 0 and -0 are both the least
			return
		}
		if d != tensor.Int64 && d != tensor.Uint64 {
			f, _ := want.Float64()
			g, _ := got.Float64()
			require.Equal(t, f+0, g+0, "%v", text)
			return
		}
		require.Zero(t, want.Cmp(got), "%v, want %v", text, want)
	}
	same(low, string(s.Min))
	same(high, string(s.Max))

	exact := func() *big.Float { return new(big.Float).SetPrec(2200) }
	count := exact().SetInt64(int64(len(values)))
	mean := exact()
	for _, v := range values {
		mean.Add(mean, v)
	}
	mean.Quo(mean, count)
	squares := exact()
	for _, v := range values {
		apart := exact().Sub(v, mean)
		squares.Add(squares, apart.Mul(apart, apart))
	}
	std := exact().Sqrt(squares.Quo(squares, count))
	wantMean, _ := mean.Float64()
	wantStd, _ := std.Float64()
	l, _ := low.Float64()
	u, _ := high.Float64()
	size := max(math.Abs(l), math.Abs(u))
	// A block's sums round as often as it has elements, mostly there and back again;
	// the mean's error moves std by less.
	require.InDelta(t, wantMean/size, s.Mean/size, 4e-15, "mean of %v", d)
	require.InDelta(t, wantStd/size, s.Std/size, 1e-12, "std of %v", d)
	if apart := wantStd / size; apart > 1e-6 {
		require.InEpsilon(t, wantStd, s.Std, 1e-15/apart+1e-12, "std of %v", d)
	}

	var all int64
	for _, n := range h.Counts {
		all += n
	}
	require.EqualValues(t, len(values), all)
	if size < 0x1p-900 {
		return // narrower than any bin
	}
	column := (h.High/2 - h.Low/2) / float64(len(h.Counts)) * 2
	slack := 0.005 * column
	if ulp := math.Nextafter(size, math.Inf(1)) - size; column < 400*ulp {
		slack += ulp
	}
	var before int64
	for i, n := range h.Counts[:len(h.Counts)-1] {
		before += n
		edge := (h.Low/2 + float64(i+1)*(column/2)) * 2
		var least, most int64
		for _, v := range values {
			x, _ := v.Float64()
			if x < edge-slack {
				least++
			}
			if x < edge+slack {
				most++
			}
		}
		require.True(t, least <= before && before <= most, "%v: %d elements before column %d at %v, want %d to %d", d, before, i+1, edge, least, most)
	}
}

func TestASummaryIsThatOfTheSlowModel(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for _, d := range tensor.DataTypes() {
		for _, n := range []int{0, 1, 2, 40, block - 1, block, block + 1, 2*block + 1} {
			t.Run(fmt.Sprintf("%v/%d", d, n), func(t *testing.T) {
				data := make([]byte, n*d.Bits()/8)
				for i := range data {
					data[i] = byte(random.Uint32())
				}
				check(t, d, data)
			})
		}
	}
}

func TestNumbersThatAreHardToSumAreSummarized(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for name, value := range map[string]func(i int) float64{
		"far from zero":          func(int) float64 { return 1e12 + random.Float64() },
		"bits apart":             func(int) float64 { return 1 + float64(random.IntN(3))*0x1p-52 },
		"all the same":           func(int) float64 { return 0.1 },
		"squares overflow":       func(int) float64 { return (random.Float64() - 0.5) * 1e308 },
		"differences overflow":   func(i int) float64 { return math.MaxFloat64 * float64(1-2*(i%2)) },
		"squares underflow":      func(int) float64 { return random.NormFloat64() * 1e-250 },
		"subnormal":              func(int) float64 { return float64(random.IntN(1000)) * math.SmallestNonzeroFloat64 },
		"growing":                func(i int) float64 { return math.Ldexp(1, i/8-600) },
		"shrinking":              func(i int) float64 { return -math.Ldexp(1, 600-i/8) },
		"going down":             func(i int) float64 { return -float64(i) },
		"going up":               func(i int) float64 { return float64(i) * 1.7 },
		"zeros, then others":     func(i int) float64 { return float64(i/block) * random.NormFloat64() },
		"one far out":            func(i int) float64 { return random.Float64() + 1e6*float64(i/(3*block)) },
		"alternating, large sum": func(i int) float64 { return 1e16*float64(1-2*(i%2)) + random.Float64() },
	} {
		t.Run(name, func(t *testing.T) {
			var data []byte
			for i := range 3*block + 1 {
				data = binary.LittleEndian.AppendUint64(data, math.Float64bits(value(i)))
			}
			check(t, tensor.Float64, data)
		})
	}
}

func TestColumnsOfWholeNumbersHaveAsManyValuesEach(t *testing.T) {
	s, err := Summarize(bytes.NewReader([]byte{0, 1, 1, 2, 3, 3, 3, 7}), tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{2, 4}})
	require.NoError(t, err)
	require.Equal(t, Histogram{0, 8, []int64{1, 2, 1, 3, 0, 0, 0, 1}}, s.Histogram(40))
	require.Equal(t, Histogram{0, 9, []int64{4, 3, 1}}, s.Histogram(3), "three values each")
	s, err = Summarize(bytes.NewReader([]byte{1, 0, 1, 1}), tensor.Desc{DType: tensor.Bool, Shape: tensor.Shape{4}})
	require.NoError(t, err)
	require.Equal(t, Histogram{0, 2, []int64{1, 3}}, s.Histogram(40))
	require.Equal(t, 0.75, s.Mean)
}

func TestLongIntegersKeepTheirLastDigit(t *testing.T) {
	data := binary.LittleEndian.AppendUint64(nil, math.MaxInt64)
	data = binary.LittleEndian.AppendUint64(data, 1<<63)
	s, err := Summarize(bytes.NewReader(data), tensor.Desc{DType: tensor.Int64, Shape: tensor.Shape{2}})
	require.NoError(t, err)
	require.EqualValues(t, "-9223372036854775808", s.Min)
	require.EqualValues(t, "9223372036854775807", s.Max)
	s, err = Summarize(bytes.NewReader(data), tensor.Desc{DType: tensor.Uint64, Shape: tensor.Shape{2}})
	require.NoError(t, err)
	require.EqualValues(t, "9223372036854775807", s.Min)
	require.EqualValues(t, "9223372036854775808", s.Max)
}

func TestAReaderGivesWhatItLikesAndNoMoreIsRead(t *testing.T) {
	data := []byte("0123456789abcdef, and more")
	r := iotest.OneByteReader(bytes.NewReader(data))
	s, err := Summarize(r, tensor.Desc{DType: tensor.Uint16, Shape: tensor.Shape{8}})
	require.NoError(t, err)
	require.EqualValues(t, 8, s.Elements)
	rest, err := io.ReadAll(r)
	require.NoError(t, err)
	require.Equal(t, ", and more", string(rest))
}

func TestAReaderThatFailsIsAnError(t *testing.T) {
	d := tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{block + 2}}
	for _, n := range []int{0, 1, block, block + 1} {
		_, err := Summarize(bytes.NewReader(make([]byte, n)), d)
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
		require.ErrorContains(t, err, fmt.Sprintf("after %d of %d bytes", n, block+2))
	}
	broken := errors.New("broken")
	_, err := Summarize(iotest.ErrReader(broken), d)
	require.ErrorIs(t, err, broken)
	_, err = Summarize(nil, tensor.Desc{})
	require.ErrorIs(t, err, tensor.ErrDataType)
}

func FuzzSummary(f *testing.F) {
	for _, d := range tensor.DataTypes() {
		f.Add(uint8(d), []byte("\x00\x00\x80\x7f\x00\x00\x00\x00\x01\x00\xf0\xff\xff\xff\xef\x7f\xff\xff\xff\xff\xff\xff\xef\xff"))
	}
	f.Fuzz(func(t *testing.T, dtype uint8, data []byte) {
		if d := tensor.DataType(dtype); d.Valid() && len(data) < 4096 {
			check(t, d, data)
		}
	})
}

func BenchmarkSummary(b *testing.B) {
	for _, d := range []tensor.DataType{tensor.Float32, tensor.BFloat16, tensor.Int64, tensor.Uint8} {
		b.Run(fmt.Sprintf("dtype=%v", d), func(b *testing.B) {
			data := make([]byte, 1<<20)
			random := rand.New(rand.NewPCG(1, 2))
			for i := range data {
				data[i] = byte(random.Uint32()) & 0x3f
			}
			b.SetBytes(int64(len(data)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Summarize(bytes.NewReader(data), tensor.Desc{DType: d, Shape: tensor.Shape{int64(len(data) * 8 / d.Bits())}}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
