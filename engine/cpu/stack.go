package cpu

import (
	"context"
	"io/fs"
	"sync"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/stack"
	"github.com/tensorferry/tensorferry/tensor"
)

// LoadFS makes the stack model of a folder of fsys, such as an embed.FS, ready on h, as
// stack.LoadFS and Stack do.
func LoadFS(h *Host, fsys fs.FS, dir string) (engine.Model, error) {
	m, err := stack.LoadFS(fsys, dir)
	if err != nil {
		return nil, err
	}
	return Stack(h, m)
}

// layers is a stack model that can be computed. Layers work on one tile at a time;
// the tiles of a block follow each other, those of other blocks run side by side.
type layers struct {
	in, out int // widths
	kernels []kernel
	tiles   sync.Pool // *tile, at most one per worker of the host in use
}

// kernel takes a tile through one layer.
type kernel func(*tile)

// tile is the state of tileRows rows or fewer on their way through the layers.
type tile struct {
	rows, width int
	x, y        []float32 // rows × width, and as much to compute into
	kept        [][]float32
	depth       int // of kept in use
}

// compile makes kernels of a model's steps.
func compile(m *stack.Model) *layers {
	l := &layers{in: m.In, out: m.Out} // without m, whose weights the kernels have
	for i := range m.Steps {
		l.kernels = append(l.kernels, kernels[m.Steps[i].Kind](&m.Steps[i]))
	}
	size, residuals := tileRows*m.Widest, m.Residuals
	l.tiles.New = func() any {
		t := &tile{x: make([]float32, size), y: make([]float32, size), kept: make([][]float32, residuals)}
		for i := range t.kept {
			t.kept[i] = make([]float32, size)
		}
		return t
	}
	return l
}

// Stack makes a stack model ready on h, which keeps none of its large weights.
func Stack(h *Host, model *stack.Model) (engine.Model, error) {
	m := compile(model)
	return RowFunc{
		Info: model.Info(),
		Outs: func(in []tensor.Desc, _ map[string]string) ([]tensor.Desc, error) {
			y := in[0].Clone()
			y.Shape[len(y.Shape)-1] = int64(m.out)
			return []tensor.Desc{y}, nil
		},
		Bind: func(c engine.Call) (RowsFunc, error) {
			f, _ := stack.FloatOf(c.Inputs[0].Desc.DType) // as its port says
			return func(ctx context.Context, b RowBlock) error { return m.compute(ctx, f, b) }, nil
		},
		InPlace: m.in == m.out, // a tile is read before it is written
	}.Model(h)
}

// compute takes a block through the layers, a tile at a time.
func (m *layers) compute(ctx context.Context, f stack.Float, b RowBlock) error {
	t := m.tiles.Get().(*tile)
	defer m.tiles.Put(t)
	in, out := b.In[0], b.Out[0]
	for rows := int(b.Rows); rows > 0; rows -= tileRows {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		t.rows, t.width, t.depth = min(rows, tileRows), m.in, 0
		n := t.rows * m.in
		f.Load(t.x[:n], in)
		in = in[n*f.Bytes:]
		for _, layer := range m.kernels {
			layer(t)
		}
		n = t.rows * m.out
		f.Store(out, t.x[:n])
		out = out[n*f.Bytes:]
	}
	return nil
}
