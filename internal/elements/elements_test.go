package elements

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/tensor"
)

func TestAnElementIsWhatItsBytesSay(t *testing.T) {
	u64 := binary.LittleEndian.AppendUint64
	f32 := func(v float32) []byte { return binary.LittleEndian.AppendUint32(nil, math.Float32bits(v)) }
	f64 := func(v float64) []byte { return u64(nil, math.Float64bits(v)) }
	for name, tc := range map[string]struct {
		dtype      tensor.DataType
		b          []byte
		text, json string
	}{
		"false":             {tensor.Bool, []byte{0}, "false", "false"},
		"true":              {tensor.Bool, []byte{7}, "true", "true"},
		"least int8":        {tensor.Int8, []byte{0x80}, "-128", "-128"},
		"int16":             {tensor.Int16, []byte{0xfe, 0xff}, "-2", "-2"},
		"int32":             {tensor.Int32, []byte{0, 0, 0, 0x80}, "-2147483648", "-2147483648"},
		"least int64":       {tensor.Int64, u64(nil, 1<<63), "-9223372036854775808", "-9223372036854775808"},
		"most uint8":        {tensor.Uint8, []byte{0xff}, "255", "255"},
		"uint16":            {tensor.Uint16, []byte{1, 2}, "513", "513"},
		"uint32":            {tensor.Uint32, []byte{0xff, 0xff, 0xff, 0xff}, "4294967295", "4294967295"},
		"most uint64":       {tensor.Uint64, u64(nil, math.MaxUint64), "18446744073709551615", "18446744073709551615"},
		"float8":            {tensor.Float8E5M2, []byte{0x3c}, "1", "1"},
		"bfloat16":          {tensor.BFloat16, []byte{0xc0, 0x3f}, "1.5", "1.5"},
		"float16 of a half": {tensor.Float16, []byte{0, 0x38}, "0.5", "0.5"},
		"float32":           {tensor.Float32, f32(0.1), "0.1", "0.1"},
		"float64":           {tensor.Float64, f64(0.1), "0.1", "0.1"},
		"minus zero":        {tensor.Float64, f64(math.Copysign(0, -1)), "-0", "-0"},
		"NaN":               {tensor.Float32, f32(float32(math.NaN())), "NaN", `"NaN"`},
		"infinity":          {tensor.Float64, f64(math.Inf(1)), "+Inf", `"Infinity"`},
		"minus infinity":    {tensor.Float64, f64(math.Inf(-1)), "-Inf", `"-Infinity"`},
		"complex64":         {tensor.Complex64, append(f32(1.5), f32(-2)...), "1.5-2i", "[1.5,-2]"},
		"complex128":        {tensor.Complex128, append(f64(0), f64(math.Inf(1))...), "0+Infi", `[0,"Infinity"]`},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, tc.text, Text(tc.dtype, tc.b))
			require.Equal(t, tc.json, string(JSON(tc.dtype, tc.b)))
			require.True(t, json.Valid(JSON(tc.dtype, tc.b)))
		})
	}
}

var cube = tensor.Desc{DType: tensor.Uint16, Shape: tensor.Shape{3, 4, 5}}

func cubeBytes() []byte {
	data := make([]byte, 0, 120)
	for i := range 60 {
		data = binary.LittleEndian.AppendUint16(data, uint16(i))
	}
	return data
}

func TestASliceIsThePartThatNumPyTakes(t *testing.T) {
	for text, want := range map[string]string{ // elements of numpy.arange(60).reshape(3, 4, 5)
		"":                    "[3 4 5]",
		"...":                 "[3 4 5]",
		":":                   "[3 4 5]",
		"1,2,3":               "[] 33",
		"-1,-1,-1":            "[] 59",
		"0,0":                 "[5] 0 1 2 3 4",
		"2, 3, :":             "[5] 55 56 57 58 59",
		":,0,0":               "[3] 0 20 40",
		"...,4":               "[3 4] 4 9 14 19 24 29 34 39 44 49 54 59",
		"1,...,0":             "[4] 20 25 30 35",
		"1:2,1:3,1:3":         "[1 2 2] 26 27 31 32",
		"0,::2,::3":           "[2 2] 0 3 10 13",
		"0,1::2,4":            "[2] 9 19",
		"0,0,-2:":             "[2] 3 4",
		"0,0,:-3":             "[2] 0 1",
		"0,0,1:100":           "[4] 1 2 3 4",
		"0,3:1":               "[0 5]",
		"5:,0,0":              "[0]",
		"::2,1:,::4":          "[2 3 2] 5 9 10 14 15 19 45 49 50 54 55 59",
		"0,0,::1000":          "[1] 0",
		"0,0,-100:2":          "[2] 0 1",
		"0:1,...,0:1":         "[1 4 1] 0 5 10 15",
		"1,2,...,3":           "[] 33",
		"1,2,3,...":           "[] 33",
		"1,2,3,4":             "error",
		"1,2,3,...,4":         "error",
		"...,...":             "error",
		"3":                   "error",
		"-4":                  "error",
		"::0":                 "error",
		"::-1":                "error",
		"1:2:3:4":             "error",
		"a":                   "error",
		",":                   "error",
		"0x1":                 "error",
		"9999999999999999999": "error",
	} {
		t.Run(text, func(t *testing.T) {
			s, err := ParseSlice(text, cube)
			if want == "error" {
				require.ErrorIs(t, err, errSlice)
				return
			}
			require.NoError(t, err)
			for _, from := range []io.Reader{bytes.NewReader(cubeBytes()), iotest.OneByteReader(bytes.NewReader(cubeBytes()))} {
				r, err := s.Reader(from)
				require.NoError(t, err)
				got, err := io.ReadAll(r)
				require.NoError(t, err)
				rest, err := io.ReadAll(from)
				require.NoError(t, err)
				require.Empty(t, rest, "it is read to its end")
				seen := s.Desc.Shape.String()
				whole, err := ParseSlice("", cube)
				require.NoError(t, err)
				for i := range len(got) / 2 {
					v := int64(binary.LittleEndian.Uint16(got[2*i:]))
					require.Equal(t, whole.Index(v), s.Index(int64(i)))
					seen += fmt.Sprint(" ", v)
				}
				if !strings.Contains(want, "] ") && len(got) > 0 {
					require.Equal(t, cubeBytes(), got)
					seen = s.Desc.Shape.String()
				}
				require.Equal(t, want, seen)
			}
		})
	}
}

func TestASliceOfATensorThatEndsEarlyIsAnError(t *testing.T) {
	broken := errors.New("broken")
	for _, text := range []string{"0,0,0", "2", "3:", "::2"} {
		s, err := ParseSlice(text, cube)
		require.NoError(t, err)
		for _, from := range []io.Reader{
			bytes.NewReader(cubeBytes()[:119]), iotest.HalfReader(bytes.NewReader(cubeBytes()[:119])),
			io.MultiReader(bytes.NewReader(cubeBytes()[:119]), iotest.ErrReader(broken)),
		} {
			r, err := s.Reader(from)
			require.NoError(t, err)
			got, err := io.ReadAll(r)
			require.True(t, errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, broken), "%v", err)
			size, err := s.Desc.Bytes()
			require.NoError(t, err)
			require.True(t, size == 0 || int64(len(got)) < size, "%d bytes", len(got))
		}
	}
}

func FuzzSlice(f *testing.F) {
	for _, text := range []string{"", "1,2,3", "::2,-1", "...,0", "0:9:2,:-1"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := ParseSlice(text, cube)
		if err != nil {
			if !errors.Is(err, errSlice) {
				t.Fatal(err)
			}
			return
		}
		r, err := s.Reader(bytes.NewReader(cubeBytes()))
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r)
		size, bad := s.Desc.Bytes()
		if err != nil || bad != nil || int64(len(got)) != size {
			t.Fatalf("%d bytes of %v: %v, %v", len(got), s.Desc, err, bad)
		}
		for i := range len(got) / 2 { // the model: each element has its place
			if index := s.Index(int64(i)); (index[0]*4+index[1])*5+index[2] != int64(binary.LittleEndian.Uint16(got[2*i:])) {
				t.Fatalf("element %d of %q is not that of %v", i, text, index)
			}
		}
	})
}

func TestTensorsAreComparedElementByElement(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for name, tc := range map[string]struct {
		a, b      []float64
		t         Tolerance
		different int64
		nonFinite int64
		abs, rel  float64
	}{
		"equal":                 {[]float64{1, nan, inf, -inf, 0}, []float64{1, nan, inf, -inf, math.Copysign(0, -1)}, Tolerance{}, 0, 0, 0, 0},
		"not":                   {[]float64{1, 2, 3}, []float64{1, 2.5, 2}, Tolerance{}, 2, 0, 1, 0.5},
		"within absolute":       {[]float64{1, 2}, []float64{1.5, 2.5}, Tolerance{Abs: 0.5}, 0, 0, 0, 0},
		"outside of absolute":   {[]float64{1, 2}, []float64{1.5, 2.75}, Tolerance{Abs: 0.5}, 1, 0, 0.75, 0.75 / 2.75},
		"within relative":       {[]float64{110}, []float64{100}, Tolerance{Rel: 0.1}, 0, 0, 0, 0},
		"relative to the other": {[]float64{100}, []float64{50}, Tolerance{Rel: 0.5}, 1, 0, 50, 1},
		"the sum of both":       {[]float64{111}, []float64{100}, Tolerance{Abs: 1, Rel: 0.1}, 0, 0, 0, 0},
		"NaN and a number":      {[]float64{nan, 1}, []float64{1, nan}, Tolerance{Abs: 1e300, Rel: 1e300}, 2, 2, 0, 0},
		"infinities":            {[]float64{inf, inf, 1}, []float64{-inf, 1, inf}, Tolerance{Abs: 1e300, Rel: 1e300}, 3, 3, 0, 0},
		"an infinity, and two":  {[]float64{1, 2, nan}, []float64{inf, 3, nan}, Tolerance{}, 2, 1, 1, 1.0 / 3},
		"beside zero":           {[]float64{1}, []float64{0}, Tolerance{Rel: 1e300}, 1, 0, 1, inf},
		"far apart":             {[]float64{math.MaxFloat64}, []float64{-math.MaxFloat64}, Tolerance{}, 1, 0, math.MaxFloat64, 1},
	} {
		t.Run(name, func(t *testing.T) {
			a, err := tensor.Of(tc.a, int64(len(tc.a)))
			require.NoError(t, err)
			b, err := tensor.Of(tc.b, int64(len(tc.b)))
			require.NoError(t, err)
			c, err := Compare(a.Desc, bytes.NewReader(a.Data), bytes.NewReader(b.Data), tc.t, 1)
			require.NoError(t, err)
			require.Equal(t, tc.different, c.Different)
			require.Equal(t, tc.nonFinite, c.NonFinite)
			require.Equal(t, tc.abs, c.MaxAbs)
			if tc.rel != c.MaxRel {
				require.InDelta(t, tc.rel, c.MaxRel, 1e-15)
			}
			require.Len(t, c.First, int(min(c.Different, 1)))
		})
	}
}

func TestLargeWholeNumbersAreComparedExactly(t *testing.T) {
	for name, tc := range map[string]struct {
		dtype     tensor.DataType
		a, b      uint64
		t         Tolerance
		different int64
	}{
		"one apart":               {tensor.Uint64, math.MaxUint64, math.MaxUint64 - 1, Tolerance{}, 1},
		"one apart, and may be":   {tensor.Uint64, math.MaxUint64, math.MaxUint64 - 1, Tolerance{Abs: 1}, 0},
		"two apart":               {tensor.Int64, 1<<63 - 1, 1<<63 - 3, Tolerance{Abs: 1}, 1},
		"of different signs":      {tensor.Int64, 1 << 63, 1<<63 - 1, Tolerance{Abs: 1 << 62}, 1},
		"of different signs, far": {tensor.Int64, 1 << 63, 1<<63 - 1, Tolerance{Abs: 1 << 63, Rel: 1}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			word := func(v uint64) io.Reader { return bytes.NewReader(binary.LittleEndian.AppendUint64(nil, v)) }
			c, err := Compare(tensor.Desc{DType: tc.dtype}, word(tc.a), word(tc.b), tc.t, 0)
			require.NoError(t, err)
			require.Equal(t, tc.different, c.Different)
		})
	}
}

func TestDifferencesAreFoundWhereTheyAre(t *testing.T) {
	d := tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{3, compareBytes}}
	a := make([]byte, 3*compareBytes)
	b := bytes.Clone(a)
	for _, at := range []int{0, compareBytes - 1, compareBytes, 3*compareBytes - 1} {
		b[at] = 7
	}
	c, err := Compare(d, bytes.NewReader(a), iotest.HalfReader(bytes.NewReader(b)), Tolerance{}, 3)
	require.NoError(t, err)
	require.EqualValues(t, len(a), c.Elements)
	require.EqualValues(t, 4, c.Different)
	for i, want := range [][]int64{{0, 0}, {0, compareBytes - 1}, {1, 0}} {
		require.Equal(t, want, c.First[i].Index)
		require.Equal(t, "7", c.First[i].TextB)
	}
	_, err = Compare(d, bytes.NewReader(a), bytes.NewReader(b[1:]), Tolerance{}, 3)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
}
