package cpu

import (
	"bytes"
	"errors"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/x448/float16"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/enginetest"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// everything has a layer of every kind, and widths that are no multiple of
// anything: 200 outputs are two panels, 70 inputs two panel depths.
var everything = Spec{Name: "everything", Version: "3", Layers: []Layer{
	{Kind: "linear", Weight: "a.weight", Bias: "a.bias"},
	{Kind: "layernorm", Weight: "ln.weight", Bias: "ln.bias"},
	{Kind: "residual", Op: "start"},
	{Kind: "gelu"},
	{Kind: "residual", Op: "start"},
	{Kind: "scale", Factor: new(0.5)},
	{Kind: "residual", Op: "add"},
	{Kind: "silu"},
	{Kind: "residual", Op: "add"},
	{Kind: "rmsnorm", Weight: "rms.weight", Eps: new(1e-4)},
	{Kind: "linear", Weight: "b.weight"},
	{Kind: "gelu", Approximate: "tanh"},
	{Kind: "layernorm"},
	{Kind: "relu"},
	{Kind: "softmax"},
}}

func weights() map[string]tensor.Tensor {
	return map[string]tensor.Tensor{
		"a.weight": floatTensor(1, 200, 70), "a.bias": floatTensor(2, 200),
		"ln.weight": floatTensor(3, 200), "ln.bias": floatTensor(4, 200), "rms.weight": floatTensor(5, 200),
		"b.weight": floatTensor(6, 13, 200),
	}
}

func stackOf(s Spec, w map[string]tensor.Tensor) func(testing.TB, int64) enginetest.Subject {
	return enginetest.OnHost(func(h *engine.Host) (engine.Model, error) { return New(h, s, w) })
}

// uncut computes all rows in one block.
func uncut(t *testing.T, m engine.Model) func(in []tensor.Tensor) ([]tensor.Tensor, error) {
	return func(in []tensor.Tensor) ([]tensor.Tensor, error) {
		return enginetest.Compute(t.Context(), m, in, nil, max(1, int64(len(in[0].Data))), 0)
	}
}

func TestStackModelsPassTheSuiteInEveryDataType(t *testing.T) {
	square := Spec{Name: "square", Layers: []Layer{{Kind: "linear", Weight: "w"}, {Kind: "relu"}}} // computed in place
	for name, c := range map[string]struct {
		spec    Spec
		weights map[string]tensor.Tensor
		width   int64
	}{
		"everything": {everything, weights(), 70},
		"in place":   {square, map[string]tensor.Tensor{"w": floatTensor(1, 30, 30)}, 30},
	} {
		for _, d := range floatTypes {
			t.Run(name+" "+d.String(), func(t *testing.T) {
				build := stackOf(c.spec, c.weights)
				enginetest.Run(t, enginetest.Case{
					New:    build,
					Inputs: []tensor.Tensor{as(d, floatTensor(9, 2, 34, c.width))},
					Empty:  []tensor.Tensor{as(d, floatTensor(9, 0, c.width))},
					Want:   uncut(t, build(t, 64<<20).Model),
				})
			})
		}
	}
}

// as converts a float32 tensor.
func as(d tensor.DataType, t tensor.Tensor) tensor.Tensor {
	xs, err := tensor.Slice[float32](t)
	if err != nil {
		panic(err)
	}
	f := floats[d]
	data := make([]byte, len(xs)*f.bytes)
	f.store(data, xs)
	return tensor.Tensor{Desc: tensor.Desc{DType: d, Shape: t.Shape}, Data: data}
}

func TestRandomCutsOfTheRowsAreBitIdentical(t *testing.T) {
	h := engine.NewHost(engine.HostConfig{Workers: 2})
	defer h.Close()
	m, err := New(h, everything, weights())
	if err != nil {
		t.Fatal(err)
	}
	in := []tensor.Tensor{floatTensor(9, 300, 70)}
	want, err := uncut(t, m)(in)
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for round := range 20 {
		var got []byte
		for row := int64(0); row < 300; {
			n := min(1+rng.Int64N(90), 300-row)
			part := tensor.Tensor{Desc: tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{n, 70}}, Data: in[0].Data[row*280 : (row+n)*280]}
			out, err := enginetest.Compute(t.Context(), m, []tensor.Tensor{part}, nil, 280*(1+rng.Int64N(100)), 1)
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, out[0].Data...)
			row += n
		}
		if !bytes.Equal(got, want[0].Data) {
			t.Fatalf("round %d differs from the uncut result", round)
		}
	}
}

// reference computes layer by layer in float64, the obvious way.
func reference(s Spec, w map[string]tensor.Tensor, x []float64) []float64 {
	values := func(name string, n int, absent float64) []float64 {
		v := make([]float64, n)
		for i := range v {
			v[i] = absent
		}
		if name != "" {
			f, err := tensor.Slice[float32](w[name])
			if err != nil {
				panic(err)
			}
			for i := range f {
				v[i] = float64(f[i])
			}
		}
		return v
	}
	var kept [][]float64
	for _, l := range s.Layers {
		n := float64(len(x))
		sum := func(f func(float64) float64) (total float64) {
			for _, v := range x {
				total += f(v)
			}
			return total
		}
		each := func(f func(i int, v float64) float64) {
			y := make([]float64, len(x))
			for i, v := range x {
				y[i] = f(i, v)
			}
			x = y
		}
		switch l.Kind + l.Op + l.Approximate {
		case "linear":
			out, in := int(w[l.Weight].Shape[0]), len(x)
			wt, y := values(l.Weight, out*in, 0), values(l.Bias, out, 0)
			for j := range y {
				for i, v := range x {
					y[j] += v * wt[j*in+i]
				}
			}
			x = y
		case "relu":
			each(func(_ int, v float64) float64 { return math.Max(v, 0) })
		case "gelu":
			each(func(_ int, v float64) float64 { return 0.5 * v * (1 + math.Erf(v/math.Sqrt2)) })
		case "gelutanh":
			each(func(_ int, v float64) float64 {
				return 0.5 * v * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(v+0.044715*v*v*v)))
			})
		case "silu":
			each(func(_ int, v float64) float64 { return v / (1 + math.Exp(-v)) })
		case "layernorm":
			wt, b := values(l.Weight, len(x), 1), values(l.Bias, len(x), 0)
			mean := sum(func(v float64) float64 { return v }) / n
			variance := sum(func(v float64) float64 { return (v - mean) * (v - mean) }) / n
			each(func(i int, v float64) float64 { return (v-mean)/math.Sqrt(variance+1e-5)*wt[i] + b[i] })
		case "rmsnorm":
			wt := values(l.Weight, len(x), 1)
			mean := sum(func(v float64) float64 { return v * v }) / n
			each(func(i int, v float64) float64 { return v / math.Sqrt(mean+*l.Eps) * wt[i] })
		case "residualstart":
			kept = append(kept, slices.Clone(x))
		case "residualadd":
			last := kept[len(kept)-1]
			kept = kept[:len(kept)-1]
			each(func(i int, v float64) float64 { return v + last[i] })
		case "scale":
			each(func(_ int, v float64) float64 { return v * *l.Factor })
		case "softmax":
			total := sum(math.Exp)
			each(func(_ int, v float64) float64 { return math.Exp(v) / total })
		default:
			panic(l.Kind)
		}
	}
	return x
}

func TestEveryLayerAgreesWithTheReference(t *testing.T) {
	h := engine.NewHost(engine.HostConfig{Workers: 2})
	defer h.Close()
	all := weights()
	for n := 1; n <= len(everything.Layers); n++ {
		s := Spec{Name: "first layers", Layers: slices.Clone(everything.Layers[:n])}
		open := 0 // residuals: close those that are
		for _, l := range s.Layers {
			open += map[string]int{"start": 1, "add": -1}[l.Op]
		}
		for range open {
			s.Layers = append(s.Layers, Layer{Kind: "residual", Op: "add"})
		}
		m, err := New(h, s, all)
		if err != nil {
			t.Fatal(err)
		}
		in := floatTensor(9, 67, 70)
		xs, err := tensor.Slice[float32](in)
		if err != nil {
			t.Fatal(err)
		}
		for d, tolerance := range map[tensor.DataType]float64{
			tensor.Float32: 2e-5, tensor.Float64: 2e-5, tensor.Float16: 2e-2, tensor.BFloat16: 2e-1,
		} {
			out, err := enginetest.Compute(t.Context(), m, []tensor.Tensor{as(d, in)}, nil, 1<<20, 0)
			if err != nil {
				t.Fatal(err)
			}
			width := int(out[0].Shape[1])
			ys := make([]float32, 67*width)
			floats[d].load(ys, out[0].Data)
			for row := range 67 {
				x := make([]float64, 70)
				for i := range x {
					x[i] = float64(xs[row*70+i])
				}
				for i, want := range reference(s, all, x) {
					got := float64(ys[row*width+i])
					if math.Abs(got-want) > tolerance*max(1, math.Abs(want)) {
						t.Fatalf("after %s, %v: row %d, column %d is %v, want %v", s.Layers[n-1].Kind, d, row, i, got, want)
					}
				}
			}
		}
	}
}

func TestSixteenBitFloatsRoundToNearestEven(t *testing.T) {
	for bits := range uint32(1 << 16) {
		wide := math.Float32frombits(bits << 16)
		if got := bfloat16(wide); wide == wide && got != uint16(bits) {
			t.Fatalf("%#04x comes back as %#04x", bits, got)
		} else if wide != wide && (got&0x7f80 != 0x7f80 || got&0x7f == 0) {
			t.Fatalf("the NaN %#04x became %#04x", bits, got)
		}
		half := float16.Frombits(uint16(bits))
		if got := float16.Fromfloat32(half.Float32()); got != half && !half.IsNaN() {
			t.Fatalf("float16 %#04x comes back as %#04x", bits, got.Bits())
		}
	}
	for u, want := range map[uint32]uint16{
		0x3f808000: 0x3f80, 0x3f818000: 0x3f82, 0x3f808001: 0x3f81, // ties to even, above a tie
		0x7f7fffff: 0x7f80, 0x7f800001: 0x7fc0, 0xffffffff: 0xffff, // overflow, a NaN of low bits only
	} {
		if got := bfloat16(math.Float32frombits(u)); got != want {
			t.Errorf("%#08x becomes %#04x, want %#04x", u, got, want)
		}
	}
}

func TestAStackThatDoesNotFitTogetherIsRefused(t *testing.T) {
	h := engine.NewHost(engine.HostConfig{Workers: 1})
	defer h.Close()
	w := weights()
	w["inf"] = floatTensor(1, 200)
	copy(w["inf"].Data[4:], []byte{0, 0, 0x80, 0x7f})
	w["ints"] = tensor.Tensor{Desc: tensor.Desc{DType: tensor.Int32, Shape: tensor.Shape{200}}, Data: make([]byte, 800)}
	w["flat"] = floatTensor(1, 70)
	w["none"] = floatTensor(1, 0, 70)
	first := Layer{Kind: "linear", Weight: "a.weight"}
	for name, layers := range map[string][]Layer{
		"no layers":              {},
		"too many layers":        slices.Repeat([]Layer{{Kind: "relu"}}, maxLayers+1),
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
		"an unknown op":          {first, {Kind: "residual", Op: "stop"}},
		"an add too many":        {first, {Kind: "residual", Op: "add"}},
		"a start too many":       {first, {Kind: "residual", Op: "start"}},
		"an add of another width": {{Kind: "linear", Weight: "a.weight"}, {Kind: "residual", Op: "start"},
			{Kind: "linear", Weight: "b.weight"}, {Kind: "residual", Op: "add"}},
		"residuals too deep": append([]Layer{first}, slices.Repeat([]Layer{{Kind: "residual", Op: "start"}}, maxResiduals+1)...),
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := New(h, Spec{Name: "m", Layers: layers}, w); !errors.Is(err, engine.ErrInfo) {
				t.Errorf("got %v, want ErrInfo", err)
			}
		})
	}
	t.Run("no name", func(t *testing.T) {
		if _, err := New(h, Spec{Layers: []Layer{first}}, w); !errors.Is(err, engine.ErrInfo) {
			t.Errorf("got %v, want ErrInfo", err)
		}
	})
	t.Run("a width over the limit", func(t *testing.T) {
		if _, err := New(h, Spec{Name: "m", Width: maxWidth + 1, Layers: []Layer{{Kind: "relu"}}}, w); !errors.Is(err, engine.ErrInfo) {
			t.Errorf("got %v, want ErrInfo", err)
		}
	})
}

func TestAFolderIsLoaded(t *testing.T) {
	h := engine.NewHost(engine.HostConfig{Workers: 1})
	defer h.Close()
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
	m, err := Load(h, dir)
	if err != nil {
		t.Fatal(err)
	}
	if i := m.Info(); i.Name != "mlp" || i.Version != "2" || i.Inputs[0].Shape[1] != 70 || i.Outputs[0].Shape[1] != 200 {
		t.Errorf("got %+v", i)
	}
	direct, err := New(h, Spec{Name: "mlp", Layers: []Layer{{Kind: "linear", Weight: "a.weight", Bias: "a.bias"}, {Kind: "gelu"}}}, w)
	if err != nil {
		t.Fatal(err)
	}
	in := []tensor.Tensor{floatTensor(9, 5, 70)}
	want, err := uncut(t, direct)(in)
	if err != nil {
		t.Fatal(err)
	}
	got, err := uncut(t, m)(in)
	if err == nil {
		err = enginetest.Equal(got, want)
	}
	if err != nil {
		t.Error(err)
	}

	for name, text := range map[string]string{
		"an unknown field":   strings.Replace(good, `"version"`, `"versoin"`, 1),
		"something after":    good + "{}",
		"no JSON":            "layers",
		"a file over limits": good + strings.Repeat(" ", maxSpecBytes),
		"a weight not there": strings.Replace(good, "a.weight", "z.weight", 1),
	} {
		t.Run(name, func(t *testing.T) {
			write("model.json", []byte(text))
			if _, err := Load(h, dir); !errors.Is(err, engine.ErrInfo) {
				t.Errorf("got %v, want ErrInfo", err)
			}
		})
	}
	t.Run("no weights", func(t *testing.T) {
		write("model.json", []byte(good))
		if err := os.Remove(filepath.Join(dir, "weights.safetensors")); err != nil {
			t.Fatal(err)
		}
		if _, err := Load(h, dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("got %v, want ErrNotExist", err)
		}
	})
}

func TestABlockOfAStackModelAllocatesNothing(t *testing.T) {
	b := builder{weight: func(name string) (tensor.Tensor, error) { return weights()[name], nil }}
	if err := b.build(everything.Layers); err != nil {
		t.Fatal(err)
	}
	x := floatTensor(9, 100, 70)
	xs := make([]float32, 64*70)
	floats[tensor.Float32].load(xs, x.Data)
	tl := tile{x: make([]float32, 64*200), y: make([]float32, 64*200), kept: [][]float32{make([]float32, 64*200), make([]float32, 64*200)}}
	if n := testing.AllocsPerRun(10, func() {
		tl.rows, tl.width, tl.depth = 64, 70, 0
		copy(tl.x, xs)
		for _, l := range b.layers {
			l(&tl)
		}
	}); n != 0 {
		t.Errorf("%v allocations per tile", n)
	}
}
