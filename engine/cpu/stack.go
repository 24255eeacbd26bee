package cpu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// Spec is a stack model: layers that x goes through one after the other. It is
// what model.json holds.
type Spec struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	// Width is the last axis of the input. Zero: what the first layer with a
	// weight takes.
	Width  int64   `json:"width,omitempty"`
	Layers []Layer `json:"layers"`
}

// Layer is one step of a stack model. Weights are named tensors; they are
// float32, float16, bfloat16 or float64, finite, and become float32.
type Layer struct {
	// Kind is one of
	//
	//	linear     x·Wᵀ + bias; weight of shape [out in], as torch.nn.Linear keeps it
	//	relu       max(x, 0); a NaN stays one
	//	gelu       x·Φ(x), exact unless Approximate is "tanh"
	//	silu       x / (1 + e⁻ˣ)
	//	layernorm  over the last axis; weight and bias of shape [width], either may be absent
	//	rmsnorm    over the last axis; weight of shape [width], may be absent
	//	residual   Op "start" remembers x, Op "add" adds what was remembered last
	//	scale      Factor · x
	//	softmax    over the last axis
	Kind        string   `json:"kind"`
	Weight      string   `json:"weight,omitempty"`
	Bias        string   `json:"bias,omitempty"`
	Approximate string   `json:"approximate,omitempty"` // gelu: "none" (or absent) or "tanh"
	Eps         *float64 `json:"eps,omitempty"`         // layernorm (absent: 1e-5), rmsnorm (1e-6)
	Op          string   `json:"op,omitempty"`          // residual
	Factor      *float64 `json:"factor,omitempty"`      // scale
}

// Load reads a stack model from a folder that holds model.json (a Spec) and
// weights.safetensors, and makes it ready on h. The weights are copied: nothing
// of the folder stays open. What does not fit together wraps engine.ErrInfo.
func Load(h *engine.Host, dir string) (engine.Model, error) {
	return load(h, dir, os.DirFS(dir), func() (*tensorfile.Safetensors, error) {
		return tensorfile.OpenSafetensors(filepath.Join(dir, weightsFile))
	})
}

// LoadFS is Load from a folder of fsys, such as an embed.FS. It reads the weights
// into memory, where Load maps them.
func LoadFS(h *engine.Host, fsys fs.FS, dir string) (engine.Model, error) {
	sub, err := fs.Sub(fsys, dir)
	if err != nil {
		return nil, fmt.Errorf("cpu: %w", err)
	}
	return load(h, dir, sub, func() (*tensorfile.Safetensors, error) {
		data, err := fs.ReadFile(sub, weightsFile)
		if err != nil {
			return nil, err
		}
		weights, err := tensorfile.ParseSafetensors(data)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", weightsFile, err)
		}
		return weights, nil
	})
}

// The files of a stack model's folder.
const (
	specFile    = "model.json"
	weightsFile = "weights.safetensors"
)

func load(h *engine.Host, dir string, files fs.FS, open func() (*tensorfile.Safetensors, error)) (engine.Model, error) {
	spec, err := readSpec(files)
	if err != nil {
		return nil, fmt.Errorf("cpu: model in %s: %w", dir, err)
	}
	weights, err := open()
	if err != nil {
		return nil, fmt.Errorf("cpu: model in %s: %w", dir, err)
	}
	defer weights.Close() // only ends the loan of the views; they have been copied
	return build(h, spec, weights.Tensor)
}

func readSpec(files fs.FS) (Spec, error) {
	var s Spec
	f, err := files.Open(specFile)
	if err != nil {
		return s, err
	}
	defer f.Close() // read only: nothing is lost
	text := &io.LimitedReader{R: f, N: maxSpecBytes + 1}
	d := json.NewDecoder(text)
	d.DisallowUnknownFields()
	if err := d.Decode(&s); err != nil && text.N > 0 {
		return s, fmt.Errorf("%s: %w: %w", specFile, engine.ErrInfo, err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) && text.N > 0 {
		return s, fmt.Errorf("%s: %w: something follows the model", specFile, engine.ErrInfo)
	}
	if text.N == 0 {
		return s, fmt.Errorf("%s: %w: more than %d bytes", specFile, engine.ErrInfo, maxSpecBytes)
	}
	return s, nil
}

// New makes a stack model ready on h. It copies the weights.
func New(h *engine.Host, s Spec, weights map[string]tensor.Tensor) (engine.Model, error) {
	return build(h, s, func(name string) (tensor.Tensor, error) {
		t, ok := weights[name]
		if !ok {
			return t, fmt.Errorf("no tensor %q", name)
		}
		return t, nil
	})
}

// stack is a model that has been built. Layers work on one tile at a time; the
// tiles of a block follow each other, those of other blocks run side by side.
type stack struct {
	layers    []func(*tile)
	in, out   int
	widest    int
	residuals int
	tiles     sync.Pool // *tile, at most one per worker of the host in use
}

// tile is the state of tileRows rows or fewer on their way through the layers.
type tile struct {
	rows, width int
	x, y        []float32 // rows × width, and as much to compute into
	kept        [][]float32
	depth       int // of kept in use
}

func build(h *engine.Host, s Spec, weight func(string) (tensor.Tensor, error)) (engine.Model, error) {
	b := builder{weight: weight, width: s.Width}
	if err := b.build(s.Layers); err != nil {
		return nil, fmt.Errorf("cpu: model %q: %w: %w", s.Name, engine.ErrInfo, err)
	}
	m := b.stack
	m.tiles.New = func() any {
		t := &tile{x: make([]float32, tileRows*m.widest), y: make([]float32, tileRows*m.widest), kept: make([][]float32, m.residuals)}
		for i := range t.kept {
			t.kept[i] = make([]float32, tileRows*m.widest)
		}
		return t
	}
	port := func(name string, width int) engine.Port {
		return engine.Port{Name: name, DTypes: floatTypes, Shape: []int64{engine.AnyAxes, int64(width)}}
	}
	return engine.RowFunc{
		Info: engine.Info{
			Name: s.Name, Version: s.Version, Rows: engine.AllButLast,
			Inputs:  []engine.Port{port("x", m.in)},
			Outputs: []engine.Port{port("y", m.out)},
		},
		Outs: func(in []tensor.Desc, _ map[string]string) ([]tensor.Desc, error) {
			y := in[0].Clone()
			y.Shape[len(y.Shape)-1] = int64(m.out)
			return []tensor.Desc{y}, nil
		},
		Bind: func(c engine.Call) (engine.RowsFunc, error) {
			f := floats[c.Inputs[0].Desc.DType]
			return func(ctx context.Context, b engine.RowBlock) error { return m.compute(ctx, f, b) }, nil
		},
		InPlace: m.in == m.out, // a tile is read before it is written
	}.Model(h)
}

// compute takes a block through the layers, a tile at a time.
func (m *stack) compute(ctx context.Context, f float, b engine.RowBlock) error {
	t := m.tiles.Get().(*tile)
	defer m.tiles.Put(t)
	in, out := b.In[0], b.Out[0]
	for rows := int(b.Rows); rows > 0; rows -= tileRows {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		t.rows, t.width, t.depth = min(rows, tileRows), m.in, 0
		n := t.rows * m.in
		f.load(t.x[:n], in)
		in = in[n*f.bytes:]
		for _, layer := range m.layers {
			layer(t)
		}
		n = t.rows * m.out
		f.store(out, t.x[:n])
		out = out[n*f.bytes:]
	}
	return nil
}
