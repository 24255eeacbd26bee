package cpu

import (
	"bytes"
	"context"
	"encoding/json"
	"math"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/enginetest"
	"github.com/tensorferry/tensorferry/engine/stack"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// apart is how far results may be from those that torch computed in float64, as a part of these or
// of 1 if that is more, by the beginning of the golden case's name. torch's own float32 is 3e-6 off in
// attention.
var apart = map[string]float64{
	"attention": 1e-5,    // sums of up to 70 terms in float32, one of which is multiplied by the largest score, 30
	"embedding": 0x1p-24, // one sum of two is rounded
	"encoder":   1.5e-5,  // attention, and sums of 48 terms
	"gated":     0x1p-23, // the activation is rounded, and the product
}

func TestTheLayersOfATransformerAgreeWithTorch(t *testing.T) {
	h := NewHost(HostConfig{Workers: 2})
	defer h.Close()
	files, err := filepath.Glob("../stack/testdata/golden/*.safetensors")
	require.NoError(t, err)
	require.Len(t, files, 18)
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".safetensors")
		t.Run(name, func(t *testing.T) {
			s, in, want := golden(t, file)
			m, err := Stack(h, s)
			require.NoError(t, err)
			y, err := uncut(t, m)(in)
			require.NoError(t, err)
			got, err := tensor.Slice[float32](y[0])
			require.NoError(t, err)
			require.Len(t, got, len(want))
			worst := 0.0
			for i, w := range want {
				off := math.Abs(float64(got[i])-w) / max(1, math.Abs(w))
				require.False(t, math.IsNaN(off), "element %d is %v, want %v", i, got[i], w)
				worst = max(worst, off)
			}
			kind, _, _ := strings.Cut(name, "-")
			require.LessOrEqual(t, worst, apart[kind])
		})
	}
}

// golden reads a case that testdata/golden.py of package stack has written.
func golden(t *testing.T, file string) (m *stack.Model, in []tensor.Tensor, want []float64) {
	t.Helper()
	f, err := tensorfile.OpenSafetensors(file)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	var s stack.Spec
	require.NoError(t, json.Unmarshal([]byte(f.Metadata()["spec"]), &s))
	all := make(map[string]tensor.Tensor)
	for _, name := range f.Names() {
		all[name], err = f.Tensor(name)
		require.NoError(t, err)
	}
	m, err = stack.New(s, all)
	require.NoError(t, err)
	in = []tensor.Tensor{all["x"]}
	if s.Mask {
		in = append(in, all["mask"])
	}
	want, err = tensor.Slice[float64](all["y"])
	require.NoError(t, err)
	return m, in, want
}

// encoder has every kind of layer that works on items. Its widths are no multiples of a tile.
func encoder(first ...stack.Layer) stack.Spec {
	return stack.Spec{Format: 2, Name: "encoder", Version: "1", Mask: true, Layers: append(first,
		stack.Layer{Kind: "positions", Weight: "places"},
		stack.Layer{Kind: "residual", Op: "start"},
		stack.Layer{Kind: "layernorm"},
		stack.Layer{Kind: "attention", Heads: 3, Weight: "in", Bias: "in.bias", OutWeight: "out", OutBias: "out.bias"},
		stack.Layer{Kind: "residual", Op: "add"},
		stack.Layer{Kind: "attention", Heads: 1, Weight: "in", OutWeight: "out", Causal: true},
		stack.Layer{Kind: "linear", Weight: "up"},
		stack.Layer{Kind: "gated", Activation: "silu"},
		stack.Layer{Kind: "linear", Weight: "down"},
	)}
}

func itemWeights(d tensor.DataType) map[string]tensor.Tensor {
	w := map[string]tensor.Tensor{
		"tokens": floatTensor(1, 50, 15), "places": floatTensor(2, 130, 15),
		"in": floatTensor(3, 45, 15), "in.bias": floatTensor(4, 45), "out": floatTensor(5, 15, 15), "out.bias": floatTensor(6, 15),
		"up": floatTensor(7, 38, 15), "down": floatTensor(8, 15, 19),
	}
	for name, t := range w {
		w[name] = as(d, t)
	}
	return w
}

// ids are of a vocabulary, in either data type.
func ids(d tensor.DataType, vocabulary uint64, shape ...int64) tensor.Tensor {
	n, err := tensor.Shape(shape).Elements()
	if err != nil {
		panic(err)
	}
	t := tensor.Tensor{Desc: tensor.Desc{DType: d, Shape: shape}, Data: make([]byte, n*int64(d.Bits()/8))}
	for i := range int(n) {
		t.Data[i*d.Bits()/8] = byte(uint64(i*i+7*i) % vocabulary)
	}
	return t
}

// masks are of a data type, one position in three hidden and the second item wholly.
func masks(d tensor.DataType, items, positions int64) tensor.Tensor {
	t := tensor.Tensor{Desc: tensor.Desc{DType: d, Shape: tensor.Shape{items, positions}}, Data: make([]byte, items*positions)}
	for i := range t.Data {
		if i%3 > 0 && int64(i)/positions != 1 {
			t.Data[i] = 1
		}
	}
	return t
}

func TestModelsOfItemsPassTheSuiteInEveryDataType(t *testing.T) {
	for _, d := range stack.DTypes {
		x := func(items, positions int64) tensor.Tensor { return as(d, floatTensor(9, items, positions, 15)) }
		// The activations of "alone", without a mask, are computed in place.
		alone, causal := encoder(), encoder()
		alone.Mask, causal.Mask = false, false
		causal.Layers[3].Causal = true // which keeps a state
		for name, c := range map[string]struct {
			spec              stack.Spec
			in, empty, nobody []tensor.Tensor
		}{
			"floats": {encoder(), []tensor.Tensor{x(21, 9), masks(tensor.Bool, 21, 9)}, []tensor.Tensor{x(0, 9), masks(tensor.Bool, 0, 9)}, []tensor.Tensor{x(3, 0), masks(tensor.Bool, 3, 0)}},
			"alone":  {alone, []tensor.Tensor{x(2, 70)}, []tensor.Tensor{x(0, 70)}, []tensor.Tensor{x(3, 0)}},
			"causal": {causal, []tensor.Tensor{x(2, 70)}, nil, nil},
			"int32":  {encoder(embed), []tensor.Tensor{ids(tensor.Int32, 50, 2, 70), masks(tensor.Uint8, 2, 70)}, []tensor.Tensor{ids(tensor.Int32, 50, 0, 9), masks(tensor.Uint8, 0, 9)}, nil},
			"int64":  {encoder(embed), []tensor.Tensor{ids(tensor.Int64, 50, 15, 9), masks(tensor.Uint8, 15, 9)}, nil, []tensor.Tensor{ids(tensor.Int64, 50, 3, 0), masks(tensor.Bool, 3, 0)}},
		} {
			t.Run(name+" "+d.String(), func(t *testing.T) {
				build := stackOf(c.spec, itemWeights(d))
				m := build(t, 64<<20).Model
				enginetest.Run(t, enginetest.Case{New: build, Inputs: c.in, Empty: c.empty, Want: uncut(t, m)})
				y, err := uncut(t, m)(c.in)
				require.NoError(t, err)
				require.Equal(t, d, y[0].DType)
				require.Equal(t, append(c.in[0].Shape[:2:2], 15), y[0].Shape)
				if c.nobody != nil {
					y, err := uncut(t, m)(c.nobody)
					require.NoError(t, err)
					require.Equal(t, tensor.Shape{3, 0, 15}, y[0].Shape)
				}
			})
		}
	}
}

var embed = stack.Layer{Kind: "embedding", Weight: "tokens"}

// TestHalfTypesAreRoundedOnce: what lies between the edges of a model is float32.
func TestHalfTypesAreRoundedOnce(t *testing.T) {
	h := NewHost(HostConfig{Workers: 2})
	defer h.Close()
	for _, d := range []tensor.DataType{tensor.Float16, tensor.BFloat16} {
		x := as(d, floatTensor(9, 5, 70, 15))
		wide := make([]float32, 5*70*15)
		toFloats(d, wide, x.Data)
		exact, err := tensor.Of(wide, 5, 70, 15)
		require.NoError(t, err)
		m, err := newStack(h, encoder(), itemWeights(d))
		require.NoError(t, err)
		mask := masks(tensor.Bool, 5, 70)
		want, err := uncut(t, m)([]tensor.Tensor{exact, mask})
		require.NoError(t, err)
		got, err := uncut(t, m)([]tensor.Tensor{x, mask})
		require.NoError(t, err)
		require.NoError(t, enginetest.Equal(got, []tensor.Tensor{as(d, want[0])}))
	}
}

func TestAttentionOfManyKeysAndWideHeadsAgreesWithTheObviousOne(t *testing.T) {
	for _, c := range []struct {
		positions, width, heads int
		causal                  bool
	}{
		{1, 1, 1, true}, {64, 8, 2, true}, {65, 8, 2, false}, {400, 6, 2, true}, {193, 5, 1, false}, {70, 400, 2, false},
	} {
		n, w := c.positions, c.width
		x, err := tensor.Slice[float32](floatTensor(11, int64(n), int64(3*w)))
		require.NoError(t, err)
		l := layers{head: w / c.heads}
		_, scores, queries := l.sizes(n, n)
		tl := tile{rows: n, width: 3 * w, x: x, y: make([]float32, n*3*w), scores: make([]float32, scores), queries: make([]float32, queries), mask: masks(tensor.Bool, 1, int64(n)).Data}
		tl.mask[0] = 1
		attention(&stack.Step{In: 3 * w, Out: w, Heads: c.heads, Causal: c.causal})(t.Context(), &tl)
		require.Equal(t, w, tl.width)
		for i := range n {
			for out := range w {
				want := obvious(x, tl.mask, n, w, w/c.heads, i, out, c.causal)
				require.InDelta(t, want, tl.x[i*w+out], 2e-6*max(1, math.Abs(want)), "%v: position %d, element %d", c, i, out)
			}
		}
	}
}

// obvious computes an element of the result of attention in float64.
func obvious(x []float32, mask []byte, n, w, head, at, out int, causal bool) float64 {
	from := out / head * head
	var sum, total float64
	for key := range n {
		if mask[key] == 0 || causal && key > at {
			continue
		}
		var dot float64
		for j := range head {
			dot += float64(x[at*3*w+from+j]) * float64(x[key*3*w+w+from+j])
		}
		e := math.Exp(dot / math.Sqrt(float64(head)))
		sum += e
		total += e * float64(x[key*3*w+2*w+out])
	}
	return total / sum
}

func TestNothingOfAHiddenPositionComesThrough(t *testing.T) {
	h := NewHost(HostConfig{Workers: 1})
	defer h.Close()
	s := encoder()
	s.Layers = s.Layers[3:4] // attention
	m, err := newStack(h, s, itemWeights(tensor.Float32))
	require.NoError(t, err)
	x, mask := floatTensor(9, 1, 70, 15), masks(tensor.Bool, 1, 70)
	before, err := uncut(t, m)([]tensor.Tensor{x, mask})
	require.NoError(t, err)
	xs, err := tensor.Slice[float32](x)
	require.NoError(t, err)
	for i := range xs {
		if mask.Data[i/15] == 0 {
			xs[i] = float32(math.NaN())
		}
	}
	after, err := uncut(t, m)([]tensor.Tensor{x, mask})
	require.NoError(t, err)
	for i, seen := range mask.Data {
		if seen != 0 {
			require.True(t, bytes.Equal(before[0].Data[60*i:60*(i+1)], after[0].Data[60*i:60*(i+1)]), "position %d", i)
		}
	}
}

func TestAnIDOutsideTheVocabularyIsNamedWithItsPlace(t *testing.T) {
	h := NewHost(HostConfig{Workers: 1})
	defer h.Close()
	m, err := newStack(h, encoder(embed), itemWeights(tensor.Float32))
	require.NoError(t, err)
	for _, d := range []tensor.DataType{tensor.Int32, tensor.Int64} {
		for text, id := range map[string][]byte{
			"-1": {255, 255, 255, 255, 255, 255, 255, 255},
			"50": {50, 0, 0, 0, 0, 0, 0, 0},
		} {
			x, size := ids(d, 50, 40, 9), d.Bits()/8
			copy(x.Data[(30*9+4)*size:][:size], id)
			_, err := enginetest.Compute(t.Context(), m, []tensor.Tensor{x, masks(tensor.Bool, 40, 9)}, nil, 64, 0)
			require.ErrorIs(t, err, engine.ErrPrecondition)
			require.ErrorContains(t, err, `input "x": wanted ids below 50, got `+text+" as item 30, position 4")
		}
	}
}

func TestItemsThatDoNotFitAreRefusedBeforeMemoryIsTaken(t *testing.T) {
	h := NewHost(HostConfig{Workers: 1})
	defer h.Close()
	m, err := newStack(h, encoder(embed), itemWeights(tensor.Float32))
	require.NoError(t, err)
	for port, in := range map[string][]tensor.Tensor{
		"x":    {ids(tensor.Int32, 50, 2, 131), masks(tensor.Bool, 2, 131)},
		"mask": {ids(tensor.Int32, 50, 2, 9), masks(tensor.Bool, 2, 8)},
	} {
		_, err := m.Open(t.Context(), enginetest.Call(m, in, nil, 64))
		var wrong *engine.InputError
		require.ErrorAs(t, err, &wrong)
		require.Equal(t, port, wrong.Port)
	}
}

func TestTheMemoryOfLongItemsIsCharged(t *testing.T) {
	const items, positions, workers = 5, 130, 2
	each := int64(4 * ((2+1)*positions*45 + positions*tileRows + 15*tileRows)) // x, y and a residual of the widest, scores, queries
	in := []tensor.Tensor{ids(tensor.Int32, 50, items, positions), masks(tensor.Bool, items, positions)}
	open := func(memory int64, in []tensor.Tensor) (used int64, err error) {
		h := NewHost(HostConfig{MemoryBytes: memory, Workers: workers})
		defer h.Close()
		m, err := newStack(h, encoder(embed), itemWeights(tensor.Float32))
		require.NoError(t, err)
		r, err := m.Open(t.Context(), enginetest.Call(m, in, nil, 1<<10))
		if err != nil {
			return 0, err
		}
		used, _, _ = h.Budget().Used()
		return used, r.Close()
	}
	used, err := open(64<<20, in)
	require.NoError(t, err)
	require.GreaterOrEqual(t, used, workers*each)
	alone := []tensor.Tensor{ids(tensor.Int32, 50, 1, positions), masks(tensor.Bool, 1, positions)}
	used, err = open(64<<20, alone)
	require.NoError(t, err)
	require.Less(t, used, workers*each, "one item needs one worker")
	_, err = open(workers*each, in)
	require.ErrorIs(t, err, slab.ErrBudget)
}

func TestABlockOfItemsAllocatesNothing(t *testing.T) {
	m, err := stack.New(encoder(embed), itemWeights(tensor.Float32))
	require.NoError(t, err)
	l := compile(m)
	f, _ := stack.FloatOf(tensor.Float32)
	x := ids(tensor.Int64, 50, 3, 9)
	one := l.tiles.Get() // a pool loses some when races are looked for
	p := pass{layers: l, x: x.Desc, out: f, positions: 9, unit: 9, tiles: &sync.Pool{New: func() any { return one }}}
	b := RowBlock{Rows: 3, In: [][]byte{x.Data, masks(tensor.Bool, 3, 9).Data}, Out: [][]byte{make([]byte, 3*9*15*4)}}
	ctx, cancel := context.WithCancel(t.Context())
	require.Zero(t, testing.AllocsPerRun(10, func() {
		if err := p.compute(ctx, b); err != nil {
			t.Error(err)
		}
	}))
	cancel()
	require.ErrorIs(t, p.compute(ctx, b), context.Canceled)
}

func TestALayerOfALongItemStopsWhenItsCallEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, s := range []stack.Step{{Kind: "activation", Activation: "silu"}, {Kind: "softmax"}, {Kind: "scale", Factor: 2}, {Kind: "gated", Out: 1, Activation: "sigmoid"}} {
		t.Run(s.Kind, func(t *testing.T) {
			x := tile{rows: 1, width: 2, x: []float32{-3, 7}, y: make([]float32, 2)}
			given := x
			kernels[s.Kind](&s)(ctx, &x)
			require.Equal(t, []float32{-3, 7}, given.x)
			require.Equal(t, []float32{0, 0}, given.y)
		})
	}
}
