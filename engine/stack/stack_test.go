package stack

import (
	"bytes"
	"encoding/binary"
	"errors"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

func weights() map[string]tensor.Tensor {
	return map[string]tensor.Tensor{
		"a.weight": floatTensor(1, 200, 70), "a.bias": floatTensor(2, 200),
		"ln.weight": floatTensor(3, 200), "ln.bias": floatTensor(4, 200), "rms.weight": floatTensor(5, 200),
		"b.weight": floatTensor(6, 13, 200),
	}
}

// floatTensor is a float32 tensor of normal numbers.
func floatTensor(seed uint64, shape ...int64) tensor.Tensor {
	rng := rand.New(rand.NewPCG(seed, 0))
	n, err := tensor.Shape(shape).Elements()
	if err != nil {
		panic(err)
	}
	data := make([]float32, n)
	for i := range data {
		data[i] = float32(rng.NormFloat64())
	}
	t, err := tensor.Of(data, shape...)
	if err != nil {
		panic(err)
	}
	return t
}

func TestSixteenBitFloatsRoundToNearestEven(t *testing.T) {
	for d, cases := range map[tensor.DataType]map[uint32]uint16{
		tensor.BFloat16: {
			0x3f808000: 0x3f80, 0x3f818000: 0x3f82, 0x3f808001: 0x3f81, // ties to even, above a tie
			0x7f7fffff: 0x7f80, 0x7f800001: 0x7fc0, // overflow, a NaN of low bits only
		},
		tensor.Float16: {0x3f801000: 0x3c00, 0x3f803000: 0x3c02, 0x3f801001: 0x3c01, 0x477ff000: 0x7c00, 0x7f800001: 0x7e00},
	} {
		f, _ := FloatOf(d)
		for u, want := range cases {
			var got [2]byte
			f.Store(got[:], []float32{math.Float32frombits(u)})
			if got := binary.LittleEndian.Uint16(got[:]); got != want {
				t.Errorf("%v: %#08x becomes %#04x, want %#04x", d, u, got, want)
			}
		}
	}
}

func TestAStackThatDoesNotFitTogetherIsRefused(t *testing.T) {
	w := weights()
	w["inf"] = floatTensor(1, 200)
	copy(w["inf"].Data[4:], []byte{0, 0, 0x80, 0x7f})
	w["ints"] = tensor.Tensor{Desc: tensor.Desc{DType: tensor.Int32, Shape: tensor.Shape{200}}, Data: make([]byte, 800)}
	w["flat"] = floatTensor(1, 70)
	w["none"] = floatTensor(1, 0, 70)
	first := Layer{Kind: "linear", Weight: "a.weight"}
	for name, layers := range map[string][]Layer{
		"no layers":              {},
		"an unknown kind":        {first, {Kind: "conv"}},
		"no width":               {{Kind: "relu"}},
		"a missing weight":       {{Kind: "linear", Weight: "c.weight"}},
		"no weight":              {first, {Kind: "linear"}},
		"a weight of rank 1":     {{Kind: "linear", Weight: "flat"}},
		"no outputs":             {{Kind: "linear", Weight: "none"}},
		"another width":          {first, first},
		"a bias of another size": {first, {Kind: "layernorm", Bias: "flat"}},
		"integers":               {first, {Kind: "layernorm", Bias: "ints"}},
		"an infinite weight":     {first, {Kind: "layernorm", Weight: "inf"}},
		"an eps below zero":      {first, {Kind: "layernorm", Eps: new(-1.0)}},
		"a bias for rmsnorm":     {first, {Kind: "rmsnorm", Bias: "a.bias"}},
		"a weight for relu":      {first, {Kind: "relu", Weight: "a.weight"}},
		"an eps for linear":      {{Kind: "linear", Weight: "a.weight", Eps: new(0.1)}},
		"another approximation":  {first, {Kind: "gelu", Approximate: "quick"}},
		"no factor":              {first, {Kind: "scale"}},
		"a factor that is none":  {first, {Kind: "scale", Factor: new(math.NaN())}},
		"a factor too large":     {first, {Kind: "scale", Factor: new(1e40)}},
		"one too far below zero": {first, {Kind: "scale", Factor: new(-3.5e38)}},
		"an unknown op":          {first, {Kind: "residual", Op: "stop"}},
		"an add too many":        {first, {Kind: "residual", Op: "add"}},
		"a start too many":       {first, {Kind: "residual", Op: "start"}},
		"an add of another width": {{Kind: "linear", Weight: "a.weight"}, {Kind: "residual", Op: "start"},
			{Kind: "linear", Weight: "b.weight"}, {Kind: "residual", Op: "add"}},
		"residuals too deep": append([]Layer{first}, slices.Repeat([]Layer{{Kind: "residual", Op: "start"}}, maxResiduals+1)...),
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := New(Spec{Name: "m", Layers: layers}, w); !errors.Is(err, engine.ErrInfo) {
				t.Errorf("got %v, want ErrInfo", err)
			}
		})
	}
	t.Run("a width over the limit", func(t *testing.T) {
		if _, err := New(Spec{Name: "m", Width: maxWidth + 1, Layers: []Layer{{Kind: "relu"}}}, w); !errors.Is(err, engine.ErrInfo) {
			t.Errorf("got %v, want ErrInfo", err)
		}
	})
}

// TestASpecOfFormat2ThatDoesNotFitTogetherIsRefused: by a sentence that says why.
func TestASpecOfFormat2ThatDoesNotFitTogetherIsRefused(t *testing.T) {
	w := map[string]tensor.Tensor{
		"tokens": floatTensor(1, 9, 6), "places": floatTensor(2, 4, 6), "narrow": floatTensor(3, 4, 5), "flat": floatTensor(4, 6),
		"in": floatTensor(5, 18, 6), "out": floatTensor(6, 6, 6), "odd": floatTensor(7, 5, 6), "bias": floatTensor(8, 6),
	}
	attention := func(f func(*Layer)) []Layer {
		l := Layer{Kind: "attention", Heads: 2, Weight: "in", OutWeight: "out"}
		f(&l)
		return []Layer{l}
	}
	embedding := Layer{Kind: "embedding", Weight: "tokens"}
	fits := func(*Layer) {}
	for name, c := range map[string]struct {
		spec Spec
		why  string
	}{
		"format 1 by itself":     {Spec{Layers: attention(fits)}, `layer 0: attention needs format 2; set "format": 2`},
		"format 1":               {Spec{Format: 1, Layers: []Layer{embedding}}, `layer 0: embedding needs format 2; set "format": 2`},
		"a mask in format 1":     {Spec{Mask: true, Layers: []Layer{{Kind: "relu"}}}, `mask needs format 2; set "format": 2`},
		"format 3":               {Spec{Format: 3, Layers: []Layer{embedding}}, "format is 3; wanted 1 or 2"},
		"format -1":              {Spec{Format: -1, Layers: []Layer{embedding}}, "format is -1; wanted 1 or 2"},
		"a mask for nothing":     {Spec{Format: 2, Mask: true, Layers: []Layer{embedding}}, "mask is set, but no layer is an attention"},
		"a later embedding":      {Spec{Format: 2, Layers: []Layer{embedding, embedding}}, "must be the first layer"},
		"an embedding of none":   {Spec{Format: 2, Layers: []Layer{{Kind: "embedding"}}}, "no width is given"},
		"no embedding's weight":  {Spec{Format: 2, Width: 6, Layers: []Layer{{Kind: "embedding"}}}, "needs a weight"},
		"a flat embedding":       {Spec{Format: 2, Layers: []Layer{{Kind: "embedding", Weight: "flat"}}}, "wanted shape [vocabulary 6]"},
		"a bias for embedding":   {Spec{Format: 2, Layers: []Layer{{Kind: "embedding", Weight: "tokens", Bias: "bias"}}}, "has no bias; its fields are kind, weight"},
		"positions of a width":   {Spec{Format: 2, Layers: []Layer{embedding, {Kind: "positions", Weight: "narrow"}}}, "wanted shape [positions 6]"},
		"no positions":           {Spec{Format: 2, Layers: []Layer{embedding, {Kind: "positions"}}}, "needs a weight"},
		"no heads":               {Spec{Format: 2, Layers: attention(func(l *Layer) { l.Heads = 0 })}, "heads is 0; wanted a divisor of the width, which is 6"},
		"heads below none":       {Spec{Format: 2, Layers: attention(func(l *Layer) { l.Heads = -2 })}, "heads is -2"},
		"heads that leave some":  {Spec{Format: 2, Layers: attention(func(l *Layer) { l.Heads = 4 })}, "heads is 4; wanted a divisor of the width, which is 6"},
		"no in_proj":             {Spec{Format: 2, Width: 6, Layers: attention(func(l *Layer) { l.Weight = "" })}, "needs a weight"},
		"no out_proj":            {Spec{Format: 2, Layers: attention(func(l *Layer) { l.OutWeight = "" })}, "out_proj: needs a weight"},
		"in_proj of a width":     {Spec{Format: 2, Layers: attention(func(l *Layer) { l.Weight = "out" })}, `in_proj: tensor "out": wanted shape [18 6], got [6 6]`},
		"out_proj of a width":    {Spec{Format: 2, Layers: attention(func(l *Layer) { l.OutWeight = "odd" })}, `out_proj: tensor "odd": wanted shape [6 6], got [5 6]`},
		"in_proj and out_proj":   {Spec{Format: 2, Layers: attention(func(l *Layer) { l.Weight, l.Bias = "out", "in" })}, `in_proj: tensor "out": wanted shape [18 6]`},
		"a bias of in_proj":      {Spec{Format: 2, Layers: attention(func(l *Layer) { l.Bias = "bias" })}, "wanted floats of shape [18]"},
		"a bias of out_proj":     {Spec{Format: 2, Layers: attention(func(l *Layer) { l.OutBias = "in" })}, "out_proj: tensor \"in\": wanted floats of shape [6]"},
		"heads for relu":         {Spec{Format: 2, Width: 6, Layers: []Layer{{Kind: "relu", Heads: 2}}}, "a relu has no heads"},
		"causal for gated":       {Spec{Format: 2, Width: 6, Layers: []Layer{{Kind: "gated", Activation: "relu", Causal: true}}}, "a gated has no causal"},
		"out_weight for linear":  {Spec{Format: 2, Layers: []Layer{{Kind: "linear", Weight: "in", OutWeight: "out"}}}, "a linear has no out_weight"},
		"out_bias for linear":    {Spec{Format: 2, Layers: []Layer{{Kind: "linear", Weight: "in", OutBias: "bias"}}}, "a linear has no out_bias"},
		"activation for gelu":    {Spec{Format: 2, Width: 6, Layers: []Layer{{Kind: "gelu", Activation: "relu"}}}, "a gelu has no activation"},
		"halves of an odd width": {Spec{Format: 2, Width: 5, Layers: []Layer{{Kind: "gated", Activation: "silu"}}}, "a width of 5 has no halves"},
		"an unknown activation":  {Spec{Format: 2, Width: 6, Layers: []Layer{{Kind: "gated", Activation: "tanh"}}}, "wanted one of relu, gelu, gelu_tanh, silu, sigmoid"},
		"no activation":          {Spec{Format: 2, Width: 6, Layers: []Layer{{Kind: "gated"}}}, `activation is ""`},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := New(c.spec, w)
			require.ErrorIs(t, err, engine.ErrInfo)
			require.ErrorContains(t, err, c.why)
		})
	}
	layers := append([]Layer{embedding, {Kind: "positions", Weight: "places"}}, attention(func(l *Layer) { l.OutBias = "bias" })...)
	m, err := New(Spec{Format: 2, Name: "fits", Mask: true, Layers: layers}, w)
	require.NoError(t, err)
	i := m.Info()
	require.NoError(t, i.Validate())
	require.Equal(t, 1, i.Rows)
	require.Equal(t, []engine.Port{
		{Name: "x", DTypes: []tensor.DataType{tensor.Int32, tensor.Int64}, Shape: []int64{engine.Free, engine.Free}},
		{Name: "mask", DTypes: []tensor.DataType{tensor.Bool, tensor.Uint8}, Shape: []int64{engine.Free, engine.Free}},
	}, i.Inputs)
	require.Equal(t, []engine.Port{{Name: "y", DTypes: []tensor.DataType{tensor.Float32}, Shape: []int64{engine.Free, engine.Free, 6}}}, i.Outputs)
	require.Equal(t, map[string]string{"layers": "3", "parameters": "228", "positions": "4", "vocabulary": "9"}, i.About)
	var kinds []string
	for _, s := range m.Steps {
		kinds = append(kinds, s.Kind)
		if s.Kind != "attention" {
			require.Equal(t, tensor.Float32, s.DType)
		}
	}
	require.Equal(t, []string{"embedding", "positions", "linear", "attention", "linear"}, kinds)

	m, err = New(Spec{Format: 2, Name: "patches", Layers: []Layer{{Kind: "linear", Weight: "out"}, {Kind: "positions", Weight: "places"}}}, w)
	require.NoError(t, err)
	require.Equal(t, 1, m.Info().Rows, "positions of an item are not rows of their own")
}

func TestAFolderIsLoaded(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, data []byte) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var named []tensorfile.Named
	w := weights()
	for _, name := range slices.Sorted(maps.Keys(w)) {
		named = append(named, tensorfile.Named{Name: name, Tensor: w[name]})
	}
	var file bytes.Buffer
	if err := tensorfile.WriteSafetensors(&file, named, nil); err != nil {
		t.Fatal(err)
	}
	write("weights.safetensors", file.Bytes())
	const good = `{"name": "mlp", "version": "2", "layers": [
		{"kind": "linear", "weight": "a.weight", "bias": "a.bias"}, {"kind": "gelu", "approximate": "none"}]}`
	write("model.json", []byte(good))
	m, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	if m.Name != "mlp" || m.Version != "2" || m.In != 70 || m.Out != 200 || m.Parameters != 14200 {
		t.Errorf("got %s %s of %d parameters, %d to %d", m.Name, m.Version, m.Parameters, m.In, m.Out)
	}
	for name, got := range map[string][]float32{"a.weight": m.Steps[0].Weight, "a.bias": m.Steps[0].Bias} {
		want, err := tensor.Slice[float32](w[name])
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s is not what was written", name)
		}
	}

	for name, c := range map[string]struct{ text, why string }{
		"an unknown format":  {strings.Replace(good, `{"name"`, `{"format": 3, "name"`, 1), `format is 3; wanted 1 or 2 (in `},
		"an unknown field":   {strings.Replace(good, `"version"`, `"versoin"`, 1), `unknown field "versoin"`},
		"something after":    {good + "{}", `something follows the model`},
		"a key twice":        {`{"name":"m","name":"n"` + good[strings.Index(good, ","):], `the key "name" comes twice`},
		"a key in two cases": {strings.Replace(good, `"kind":`, `"Kind":"scale","kind":`, 1), `the key "kind" comes twice`},
		"no JSON":            {"layers", `byte 1: invalid character`},
		"a file over limits": {good + strings.Repeat(" ", maxSpecBytes), `more than 1048576 bytes`},
		"a weight not there": {strings.Replace(good, "a.weight", "z.weight", 1), `"z.weight"; the file holds`},
	} {
		t.Run(name, func(t *testing.T) {
			write("model.json", []byte(c.text))
			_, err := Load(dir)
			require.ErrorIs(t, err, engine.ErrInfo)
			require.ErrorContains(t, err, c.why)
		})
	}
	t.Run("no weights", func(t *testing.T) {
		write("model.json", []byte(good))
		if err := os.Remove(filepath.Join(dir, "weights.safetensors")); err != nil {
			t.Fatal(err)
		}
		if _, err := Load(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("got %v, want ErrNotExist", err)
		}
	})
}

func TestAbsentWeightsOfManyLayersAreTheSameMemory(t *testing.T) {
	m, err := New(Spec{Name: "norms", Width: 8, Layers: []Layer{{Kind: "layernorm"}, {Kind: "layernorm"}, {Kind: "rmsnorm"}}}, nil)
	require.NoError(t, err)
	for _, s := range m.Steps {
		require.Equal(t, slices.Repeat([]float32{1}, 8), s.Weight)
		require.Equal(t, make([]float32, 8), s.Bias)
		require.Same(t, &m.Steps[0].Weight[0], &s.Weight[0])
		require.Same(t, &m.Steps[0].Bias[0], &s.Bias[0])
	}
}
