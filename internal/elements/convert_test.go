package elements

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/tensor"
)

func TestConvertRoundsEachElementOnce(t *testing.T) {
	const odd = 1<<53 + 1<<29 + 1 // float64 would round it to the middle of two of float32
	for name, tc := range map[string]struct {
		from tensor.DataType
		src  []byte
		want []float32
	}{
		"bool":     {tensor.Bool, []byte{0, 1, 7}, []float32{0, 1, 1}},
		"int8":     {tensor.Int8, []byte{0xff, 5}, []float32{-1, 5}},
		"uint16":   {tensor.Uint16, []byte{0xff, 0xff}, []float32{65535}},
		"int64":    {tensor.Int64, le.AppendUint64(nil, odd), []float32{1<<53 + 1<<30}},
		"uint64":   {tensor.Uint64, le.AppendUint64(nil, math.MaxUint64), []float32{1 << 64}},
		"float64":  {tensor.Float64, le.AppendUint64(nil, math.Float64bits(0.1)), []float32{0.1}},
		"float32":  {tensor.Float32, le.AppendUint32(nil, math.Float32bits(-3)), []float32{-3}},
		"float16":  {tensor.Float16, []byte{0x00, 0x3e, 0x00, 0xfc}, []float32{1.5, float32(math.Inf(-1))}},
		"bfloat16": {tensor.BFloat16, []byte{0xc0, 0x3f}, []float32{1.5}},
	} {
		t.Run(name, func(t *testing.T) {
			dst := make([]byte, 4*len(tc.want))
			Convert(dst, tensor.Float32, tc.src, tc.from)
			for i, want := range tc.want {
				require.Equal(t, want, math.Float32frombits(le.Uint32(dst[4*i:])))
			}
		})
	}
}

func TestConvertNarrowsInPlace(t *testing.T) {
	var b []byte
	for _, v := range []float32{1, -2, 65504, 1e6, 5.9604645e-08, float32(math.NaN())} {
		b = le.AppendUint32(b, math.Float32bits(v))
	}
	Convert(b, tensor.Float16, b, tensor.Float32)
	for i, want := range []uint16{0x3c00, 0xc000, 0x7bff, 0x7c00, 0x0001, 0x7e00} {
		require.Equal(t, want, le.Uint16(b[2*i:]), "element %d", i)
	}
}
