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
	"testing"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/enginetest"
	"github.com/tensorferry/tensorferry/engine/stack"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// everything has a layer of every kind, and widths that are no multiple of
// anything: 200 outputs are two panels, 70 inputs two panel depths.
var everything = stack.Spec{Name: "everything", Version: "3", Layers: []stack.Layer{
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

func stackOf(s stack.Spec, w map[string]tensor.Tensor) func(testing.TB, int64) enginetest.Subject {
	return enginetest.On(newHost, func(h *Host) (engine.Model, error) { return newStack(h, s, w) })
}

func newStack(h *Host, s stack.Spec, w map[string]tensor.Tensor) (engine.Model, error) {
	m, err := stack.New(s, w)
	if err != nil {
		return nil, err
	}
	return Stack(h, m)
}

// uncut computes all rows in one block.
func uncut(t *testing.T, m engine.Model) func(in []tensor.Tensor) ([]tensor.Tensor, error) {
	return func(in []tensor.Tensor) ([]tensor.Tensor, error) {
		return enginetest.Compute(t.Context(), m, in, nil, max(1, int64(len(in[0].Data))), 0)
	}
}

func TestStackModelsPassTheSuiteInEveryDataType(t *testing.T) {
	square := stack.Spec{Name: "square", Layers: []stack.Layer{{Kind: "linear", Weight: "w"}, {Kind: "relu"}}} // computed in place
	for name, c := range map[string]struct {
		spec    stack.Spec
		weights map[string]tensor.Tensor
		width   int64
	}{
		"everything": {everything, weights(), 70},
		"in place":   {square, map[string]tensor.Tensor{"w": floatTensor(1, 30, 30)}, 30},
	} {
		for _, d := range stack.DTypes {
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
	f, _ := stack.FloatOf(d)
	data := make([]byte, len(xs)*f.Bytes)
	f.Store(data, xs)
	return tensor.Tensor{Desc: tensor.Desc{DType: d, Shape: t.Shape}, Data: data}
}

func toFloats(d tensor.DataType, dst []float32, src []byte) {
	f, _ := stack.FloatOf(d)
	f.Load(dst, src)
}

func TestRandomCutsOfTheRowsAreBitIdentical(t *testing.T) {
	h := NewHost(HostConfig{Workers: 2})
	defer h.Close()
	m, err := newStack(h, everything, weights())
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
func reference(s stack.Spec, w map[string]tensor.Tensor, x []float64) []float64 {
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
	h := NewHost(HostConfig{Workers: 2})
	defer h.Close()
	all := weights()
	for n := 1; n <= len(everything.Layers); n++ {
		s := stack.Spec{Name: "first layers", Layers: slices.Clone(everything.Layers[:n])}
		open := 0 // residuals: close those that are
		for _, l := range s.Layers {
			open += map[string]int{"start": 1, "add": -1}[l.Op]
		}
		for range open {
			s.Layers = append(s.Layers, stack.Layer{Kind: "residual", Op: "add"})
		}
		m, err := newStack(h, s, all)
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
			toFloats(d, ys, out[0].Data)
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

func TestABlockOfAStackModelAllocatesNothing(t *testing.T) {
	m, err := stack.New(everything, weights())
	if err != nil {
		t.Fatal(err)
	}
	kernels := compile(m).kernels
	x := floatTensor(9, 100, 70)
	xs := make([]float32, 64*70)
	toFloats(tensor.Float32, xs, x.Data)
	tl := tile{x: make([]float32, 64*200), y: make([]float32, 64*200), kept: [][]float32{make([]float32, 64*200), make([]float32, 64*200)}}
	if n := testing.AllocsPerRun(10, func() {
		tl.rows, tl.width, tl.depth = 64, 70, 0
		copy(tl.x, xs)
		for _, l := range kernels {
			l(t.Context(), &tl)
		}
	}); n != 0 {
		t.Errorf("%v allocations per tile", n)
	}
}

func TestAFolderIsComputedAsItsSpecIs(t *testing.T) {
	h := NewHost(HostConfig{Workers: 1})
	defer h.Close()
	dir := t.TempDir()
	w := weights()
	file, err := os.Create(filepath.Join(dir, "weights.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(tensorfile.WriteSafetensors(file, []tensorfile.Named{{Name: "a.weight", Tensor: w["a.weight"]}, {Name: "a.bias", Tensor: w["a.bias"]}}, nil), file.Close()); err != nil {
		t.Fatal(err)
	}
	const spec = `{"name": "mlp", "version": "2", "layers": [
		{"kind": "linear", "weight": "a.weight", "bias": "a.bias"}, {"kind": "gelu", "approximate": "none"}]}`
	if err := os.WriteFile(filepath.Join(dir, "model.json"), []byte(spec), 0o600); err != nil {
		t.Fatal(err)
	}
	m, err := LoadFS(h, os.DirFS(dir), ".")
	if err != nil {
		t.Fatal(err)
	}
	i := m.Info()
	if i.Name != "mlp" || i.Version != "2" || i.Inputs[0].Shape[1] != 70 || i.Outputs[0].Shape[1] != 200 {
		t.Errorf("got %+v", i)
	}
	if want := map[string]string{"layers": "2", "parameters": "14200"}; !maps.Equal(i.About, want) {
		t.Errorf("it is about %v, want %v", i.About, want)
	}
	direct, err := newStack(h, stack.Spec{Name: "mlp", Layers: []stack.Layer{{Kind: "linear", Weight: "a.weight", Bias: "a.bias"}, {Kind: "gelu"}}}, w)
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
}

func TestAStackWithoutANameIsRefused(t *testing.T) {
	h := NewHost(HostConfig{Workers: 1})
	defer h.Close()
	s := stack.Spec{Layers: []stack.Layer{{Kind: "linear", Weight: "a.weight"}}}
	if _, err := newStack(h, s, weights()); !errors.Is(err, engine.ErrInfo) {
		t.Errorf("got %v, want ErrInfo", err)
	}
}
