//go:build linux && cgo

package cuda_test

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/engine/cuda"
	"github.com/tensorferry/tensorferry/engine/enginetest"
	"github.com/tensorferry/tensorferry/engine/stack"
	"github.com/tensorferry/tensorferry/tensor"
)

// as converts floats, in float32, to a data type.
func as(d tensor.DataType, x tensor.Tensor) tensor.Tensor {
	from, _ := stack.FloatOf(x.DType)
	to, _ := stack.FloatOf(d)
	wide := make([]float32, len(x.Data)/from.Bytes)
	from.Load(wide, x.Data)
	y := tensor.Tensor{Desc: tensor.Desc{DType: d, Shape: x.Shape}, Data: make([]byte, len(wide)*to.Bytes)}
	to.Store(y.Data, wide)
	return y
}

// ids are of a vocabulary of 50.
func ids(d tensor.DataType, items, positions int64) tensor.Tensor {
	size := d.Bits() / 8
	x := tensor.Tensor{Desc: tensor.Desc{DType: d, Shape: tensor.Shape{items, positions}}, Data: make([]byte, int(items*positions)*size)}
	for i := range int(items * positions) {
		x.Data[i*size] = byte(i * (i + 7) % 50)
	}
	return x
}

// masks hide one position in three, and all of the second item.
func masks(items, positions int64) tensor.Tensor {
	x := tensor.Tensor{Desc: tensor.Desc{DType: tensor.Bool, Shape: tensor.Shape{items, positions}}, Data: make([]byte, items*positions)}
	for i := range x.Data {
		if i%3 > 0 && int64(i)/positions != 1 {
			x.Data[i] = 1
		}
	}
	return x
}

// weights are those of all models below. Their widths are no multiples of a tile or a warp.
func weights(d tensor.DataType) map[string]tensor.Tensor {
	all := map[string]tensor.Tensor{
		"tokens": floats(1, 50, 30), "places": floats(2, 130, 30), "scale": floats(3, 30), "shift": floats(4, 30),
		"in": weight(5, 90, 30), "in.bias": weight(6, 90), "out": weight(7, 30, 30), "out.bias": weight(8, 30),
		"up": weight(9, 76, 30), "down": weight(10, 30, 38),
	}
	for name, w := range all {
		all[name] = as(d, w)
	}
	return all
}

func gated(activation string) []stack.Layer {
	return []stack.Layer{{Kind: "linear", Weight: "up"}, {Kind: "gated", Activation: activation}, {Kind: "linear", Weight: "down"}}
}

func attention(heads int, causal bool) stack.Layer {
	return stack.Layer{Kind: "attention", Heads: heads, Causal: causal, Weight: "in", Bias: "in.bias", OutWeight: "out", OutBias: "out.bias"}
}

// encoder has every kind of layer that works on items.
func encoder() stack.Spec {
	return stack.Spec{Mask: true, Layers: slices.Concat([]stack.Layer{
		{Kind: "embedding", Weight: "tokens"}, {Kind: "positions", Weight: "places"},
		{Kind: "residual", Op: "start"}, {Kind: "layernorm", Weight: "scale", Bias: "shift"}, attention(3, false), {Kind: "residual", Op: "add"},
		{Kind: "residual", Op: "start"}, {Kind: "rmsnorm"}, attention(1, true), {Kind: "residual", Op: "add"},
	}, gated("silu"))}
}

// layered are models of the layers that mlp has not.
var layered = map[string]stack.Spec{
	"layernorm":      {Width: 30, Layers: []stack.Layer{{Kind: "layernorm", Weight: "scale", Bias: "shift"}}},
	"plain norms":    {Width: 30, Layers: []stack.Layer{{Kind: "rmsnorm"}, {Kind: "layernorm"}}},
	"rmsnorm":        {Width: 30, Layers: []stack.Layer{{Kind: "rmsnorm", Weight: "scale"}}},
	"softmax":        {Width: 30, Layers: []stack.Layer{{Kind: "softmax"}}},
	"gated relu":     {Width: 30, Layers: gated("relu")},
	"gated gelu":     {Width: 30, Layers: gated("gelu")},
	"gated tanh":     {Width: 30, Layers: gated("gelu_tanh")},
	"gated silu":     {Width: 30, Layers: gated("silu")},
	"gated sigmoid":  {Width: 30, Layers: gated("sigmoid")},
	"positions":      {Layers: []stack.Layer{{Kind: "positions", Weight: "places"}}},
	"embedding":      {Layers: []stack.Layer{{Kind: "embedding", Weight: "tokens"}}},
	"attention":      {Layers: []stack.Layer{attention(2, false)}},
	"causal":         {Layers: []stack.Layer{attention(5, true)}},
	"masked":         {Mask: true, Layers: []stack.Layer{attention(1, false)}},
	"masked, causal": {Mask: true, Layers: []stack.Layer{attention(3, true)}},
	"an encoder":     encoder(),
}

// both make a stack model ready on a device and on the CPU.
func both(t testing.TB, r *rig, s stack.Spec, d tensor.DataType) (there, here engine.Model) {
	t.Helper()
	m := modelOf(t, s, d)
	there, err := cuda.Stack(r.open(t, r.config(64*mib)), m)
	require.NoError(t, err)
	return there, oracle(t, m)
}

func modelOf(t testing.TB, s stack.Spec, d tensor.DataType) *stack.Model {
	t.Helper()
	s.Format, s.Name = 2, "layers"
	m, err := stack.New(s, weights(d))
	require.NoError(t, err)
	return m
}

// oracle is a stack model on the CPU.
func oracle(t testing.TB, m *stack.Model) engine.Model {
	t.Helper()
	host := cpu.NewHost(cpu.HostConfig{})
	t.Cleanup(host.Close)
	here, err := cpu.Stack(host, m)
	require.NoError(t, err)
	return here
}

// inputs are some of a model, float or not.
func inputs(m engine.Model, d tensor.DataType, items, positions int64) []tensor.Tensor {
	in := []tensor.Tensor{as(d, floats(11, items, positions, 30))}
	if ports := m.Info().Inputs; slices.Contains(ports[0].DTypes, tensor.Int64) {
		in[0] = ids(ports[0].DTypes[items%2], items, positions)
	}
	if len(m.Info().Inputs) > 1 {
		in = append(in, masks(items, positions))
	}
	return in
}

// apart is how far a result may be from the CPU's, as a part of that or of 1 if that is less:
// both sum in float32, in another order, and the encoder has eight sums in a row; the
// half types may be rounded the other way.
var apart = map[tensor.DataType]float64{
	tensor.Float32: 1e-5, tensor.Float64: 1e-5, tensor.Float16: 1e-5 + 0x1p-10, tensor.BFloat16: 1e-5 + 0x1p-7,
}

func requireNear(t *testing.T, want, got tensor.Tensor, part float64) {
	t.Helper()
	require.Equal(t, want.Desc, got.Desc)
	ws, gs := as(tensor.Float32, want), as(tensor.Float32, got)
	a, err := tensor.Slice[float32](ws)
	require.NoError(t, err)
	b, err := tensor.Slice[float32](gs)
	require.NoError(t, err)
	for i := range a {
		require.LessOrEqual(t, math.Abs(float64(a[i])-float64(b[i])), part*max(1, math.Abs(float64(a[i]))), "element %d is %v, wanted %v", i, b[i], a[i])
	}
}

func TestEveryLayerIsNearTheCPUsInEveryDataTypeHoweverItIsCut(t *testing.T) {
	r, seen := newRig(t), map[string]bool{}
	for _, s := range mlp(t).Steps {
		kind := s.Kind
		if kind == "activation" {
			kind = strings.TrimSuffix(s.Activation, "_tanh")
		}
		seen[kind] = true
	}
	for name, s := range layered {
		for _, l := range s.Layers {
			seen[l.Kind] = true
		}
		for _, d := range stack.DTypes {
			t.Run(fmt.Sprint(name, " ", d), func(t *testing.T) {
				there, here := both(t, r, s, d)
				require.Equal(t, here.Info().Inputs, there.Info().Inputs)
				require.Equal(t, here.Info().Outputs, there.Info().Outputs)
				for positions, items := range map[int64]int64{9: 7, 70: 2} {
					if positions > 9 && d != tensor.Float32 {
						continue // the kernels between are the same
					}
					in := inputs(there, d, items, positions)
					want, err := engine.Compute(t.Context(), here, nil, in...)
					require.NoError(t, err)
					whole, err := engine.Compute(t.Context(), there, nil, in...)
					require.NoError(t, err)
					requireNear(t, want[0], whole[0], apart[d])
					cut, err := enginetest.Compute(t.Context(), there, in, nil, int64(len(in[0].Data)/4), 1)
					require.NoError(t, err)
					require.NoError(t, enginetest.Equal(cut, whole))
				}
			})
		}
	}
	require.Equal(t, stack.Kinds(), slices.Sorted(maps.Keys(seen)))
}

func TestAnEncoderPassesTheSuite(t *testing.T) {
	r := newRig(t)
	s := encoder()
	s.Layers = append(s.Layers[:1:1], attention(1, true)) // each barrier of a block costs the fake driver 256 turns
	m := modelOf(t, s, tensor.Float32)
	here := oracle(t, m)
	enginetest.Run(t, enginetest.Case{
		New:    closing(t, enginetest.On(r.host, func(h *cuda.Host) (engine.Model, error) { return cuda.Stack(h, m) })),
		Inputs: inputs(here, tensor.Float32, 12, 5),
		Empty:  inputs(here, tensor.Float32, 0, 5),
		Near:   apart[tensor.Float32],
		Want: func(in []tensor.Tensor) ([]tensor.Tensor, error) {
			return engine.Compute(context.Background(), here, nil, in...)
		},
	})
}

func TestItemsWithoutPositionsAreNothing(t *testing.T) {
	there, _ := both(t, newRig(t), encoder(), tensor.Float16)
	y, err := engine.Compute(t.Context(), there, nil, inputs(there, tensor.Float16, 3, 0)...)
	require.NoError(t, err)
	require.Equal(t, tensor.Shape{3, 0, 30}, y[0].Shape)
}

func TestAMaskHasRoomBehindALaneThatIsFull(t *testing.T) {
	there, here := both(t, newRig(t), layered["masked"], tensor.Float32)
	in := inputs(there, tensor.Float32, 32, 91) // x and y of 90 columns, but for 512 bytes 2 MiB
	want, err := engine.Compute(t.Context(), here, nil, in...)
	require.NoError(t, err)
	got, err := engine.Compute(t.Context(), there, nil, in...)
	require.NoError(t, err)
	requireNear(t, want[0], got[0], apart[tensor.Float32])
}

// linears are layers of these widths.
func linears(widths ...int64) (s stack.Spec, weights map[string]tensor.Tensor) {
	s.Name, weights = "linears", make(map[string]tensor.Tensor)
	for i, width := range widths[1:] {
		name := fmt.Sprint(i)
		s.Layers = append(s.Layers, stack.Layer{Kind: "linear", Weight: name})
		weights[name] = weight(uint64(i), width, widths[i])
	}
	return s, weights
}

func TestALaneHasRoomForInputThatIsWiderThanAllThatFollows(t *testing.T) {
	m, err := stack.New(linears(64, 3))
	require.NoError(t, err)
	r := newRig(t)
	there, err := cuda.Stack(r.open(t, r.config(64*mib)), m)
	require.NoError(t, err)
	for _, d := range stack.DTypes {
		x := as(d, floats(1, 2000, 64))
		want, err := engine.Compute(t.Context(), oracle(t, m), nil, x)
		require.NoError(t, err)
		got, err := engine.Compute(t.Context(), there, nil, x)
		require.NoError(t, err)
		requireNear(t, want[0], got[0], apart[d])
	}
}

// A GPU kills the context for an access that is not aligned, which the CPU of the fake driver allows.
func TestWhatLiesBetweenTwoLayersIsAligned(t *testing.T) {
	m, err := stack.New(linears(31, 75, 75, 31))
	require.NoError(t, err)
	r := newRig(t)
	there, err := cuda.Stack(r.open(t, r.config(64*mib)), m)
	require.NoError(t, err)
	for _, d := range stack.DTypes {
		for rows := range int64(4) {
			x := as(d, floats(1, rows+1, 31))
			want, err := engine.Compute(t.Context(), oracle(t, m), nil, x)
			require.NoError(t, err)
			got, err := engine.Compute(t.Context(), there, nil, x)
			require.NoError(t, err)
			requireNear(t, want[0], got[0], apart[d])
		}
	}
}

func TestNothingOfAHiddenPositionComesThrough(t *testing.T) {
	there, _ := both(t, newRig(t), stack.Spec{Mask: true, Layers: []stack.Layer{attention(2, false)}}, tensor.Float32)
	in := inputs(there, tensor.Float32, 1, 70)
	before, err := engine.Compute(t.Context(), there, nil, in...)
	require.NoError(t, err)
	xs, err := tensor.Slice[float32](in[0])
	require.NoError(t, err)
	for i := range xs {
		if in[1].Data[i/30] == 0 {
			xs[i] = float32(math.NaN())
		}
	}
	after, err := engine.Compute(t.Context(), there, nil, in...)
	require.NoError(t, err)
	for i, seen := range in[1].Data {
		if seen != 0 {
			require.Equal(t, before[0].Data[120*i:120*(i+1)], after[0].Data[120*i:120*(i+1)], "position %d", i)
		}
	}
}

// A score that overflows is seen as such, as on the CPU and by torch: nothing finite comes of it.
func TestAnOverflownScoreIsNotAHiddenOne(t *testing.T) {
	s := stack.Spec{Format: 2, Name: "overflows", Mask: true, Layers: []stack.Layer{{Kind: "attention", Heads: 1, Weight: "in", OutWeight: "out"}}}
	weights := make(map[string]tensor.Tensor)
	for name, w := range map[string][]float32{"in": {1, -1, 1}, "out": {1}} {
		var err error
		weights[name], err = tensor.Of(w, int64(len(w)), 1)
		require.NoError(t, err)
	}
	m, err := stack.New(s, weights)
	require.NoError(t, err)
	r := newRig(t)
	there, err := cuda.Stack(r.open(t, r.config(64*mib)), m)
	require.NoError(t, err)
	const big = 1e20 // times itself it is no float32
	for _, xs := range [][]float32{{big}, {big, 2 * big}, {big, 1}, {big, -big}, {1, 2}} {
		for _, seen := range []byte{0, 1} {
			x, err := tensor.Of(xs, 1, int64(len(xs)), 1)
			require.NoError(t, err)
			mask := tensor.Tensor{Desc: tensor.Desc{DType: tensor.Bool, Shape: tensor.Shape{1, int64(len(xs))}}, Data: bytes.Repeat([]byte{seen}, len(xs))}
			want, err := engine.Compute(t.Context(), oracle(t, m), nil, x, mask)
			require.NoError(t, err)
			got, err := engine.Compute(t.Context(), there, nil, x, mask)
			require.NoError(t, err)
			a, err := tensor.Slice[float32](want[0])
			require.NoError(t, err)
			b, err := tensor.Slice[float32](got[0])
			require.NoError(t, err)
			for i := range a {
				require.InDelta(t, a[i], b[i], 1e-5, "position %d of %v, seen %d", i, xs, seen)
			}
		}
	}
}

func TestAnIDOutsideTheVocabularyFailsTheCallByItsNameAndNoOther(t *testing.T) {
	there, here := both(t, newRig(t), encoder(), tensor.Float32)
	for _, items := range []int64{40, 41} { // of either data type
		good := inputs(there, tensor.Float32, items, 9)
		for _, id := range []byte{50, 255} {
			in := []tensor.Tensor{{Desc: good[0].Desc, Data: slices.Clone(good[0].Data)}, good[1]}
			size := in[0].DType.Bits() / 8
			for i := range size {
				in[0].Data[(30*9+4)*size+i] = id * min(1, id/255+byte(max(0, 1-i))) // 50, or -1
			}
			_, wanted := enginetest.Compute(t.Context(), here, in, nil, 64, 0)
			_, err := enginetest.Compute(t.Context(), there, in, nil, 64, 0)
			require.ErrorIs(t, err, engine.ErrPrecondition)
			require.EqualError(t, err, wanted.Error())
		}
		_, err := engine.Compute(t.Context(), there, nil, good...)
		require.NoError(t, err, "the device goes on")
	}
}

func TestASequenceOfPositionsIsRefusedAndOneOfRowsIsNot(t *testing.T) {
	r := newRig(t)
	begin := func(name string) (engine.State, error) {
		there, err := cuda.Stack(r.open(t, r.config(64*mib)), modelOf(t, layered[name], tensor.Float32))
		require.NoError(t, err)
		q, ok := engine.As[engine.Sequencer](there)
		require.True(t, ok)
		return q.Begin(t.Context(), engine.Sequence{ID: tensor.ID{1}, MaxRows: 9})
	}
	s, err := begin("causal")
	require.Nil(t, s)
	require.ErrorIs(t, err, engine.ErrPrecondition)
	require.ErrorContains(t, err, "serve it with --engine cpu")
	s, err = begin("rmsnorm")
	require.NoError(t, err)
	require.Nil(t, s, "the calls are independent")
}

func TestWeightsOfHalfTypesTakeHalfTheMemory(t *testing.T) {
	there, _ := both(t, newRig(t), stack.Spec{Layers: []stack.Layer{{Kind: "linear", Weight: "up"}}}, tensor.BFloat16)
	require.Equal(t, fmt.Sprint(76*30*2+76*4), there.Info().About["device_bytes"])
}

func TestALayerThatADeviceHasNotIsRefusedByItsName(t *testing.T) {
	r := newRig(t)
	_, err := cuda.Stack(r.open(t, r.config(mib)), &stack.Model{Name: "odd", In: 3, Out: 3, Steps: []stack.Step{{Kind: "activation", Activation: "relu"}, {Kind: "odd"}}})
	require.ErrorIs(t, err, engine.ErrUnavailable)
	require.ErrorContains(t, err, "layer 1: odd")
}
