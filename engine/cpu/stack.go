package cpu

import (
	"context"
	"io/fs"
	"sync"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/blocks"
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
	stack.Model           // without steps, whose weights the kernels have
	table       []float32 // of the embedding, if there is one
	kernels     []kernel
	head        int        // the width of the widest head, 0 without attention
	keep        int        // numbers that a sequence keeps of a position
	ahead       bool       // an attention looks at later positions
	tiles       *sync.Pool // *tile of tileRows; in use are at most as many as blocks may be computed and rest
}

// kernel takes a tile through one layer. One that works long stops soon after ctx ends.
type kernel func(ctx context.Context, t *tile)

// tile is the state of rows on their way through the layers: tileRows or fewer, or
// the positions of an item.
type tile struct {
	rows, width     int
	x, y            []float32 // rows × width, and as much to compute into
	kept            [][]float32
	depth           int       // of kept in use
	past, most      int       // positions of the sequence before these, and in all
	cache           []float32 // of the sequence, for the attention layers to come; nil: it is of none
	mask            []byte    // by row: 0 is not attended to; nil: all are
	scores, queries []float32 // of attention: tileRows by key, and those of one head
	charged         bool      // to a call
}

// rest lets others be computed, and reports whether the run has ended.
func (t *tile) rest(ctx context.Context) bool { return rest(ctx, t.charged) }

// compile makes kernels of a model's steps.
func compile(m *stack.Model) *layers {
	l, steps := &layers{Model: *m}, m.Steps
	l.Steps = nil
	if m.Vocabulary > 0 {
		l.table, steps = steps[0].Weight, steps[1:]
	}
	for i := range steps {
		s := &steps[i]
		l.kernels = append(l.kernels, kernels[s.Kind](s))
		if s.Heads > 0 {
			l.head = max(l.head, s.Out/s.Heads)
			l.keep += 2 * s.Out
			l.ahead = l.ahead || !s.Causal
		}
	}
	l.tiles = l.newTiles(tileRows, tileRows, false)
	return l
}

// sizes are the lengths of what a tile is made of: x, y and each of kept, the scores and the queries.
func (m *layers) sizes(rows, keys int) (size, scores, queries int) {
	return rows * m.Widest, keys * min(m.head, 1) * min(rows, tileRows), m.head * tileRows
}

func (m *layers) newTiles(rows, keys int, charged bool) *sync.Pool {
	size, scores, queries := m.sizes(rows, keys)
	residuals := m.Residuals // and not m, whose pool this is
	return &sync.Pool{New: func() any {
		t := &tile{x: make([]float32, size), y: make([]float32, size), kept: make([][]float32, residuals), charged: charged}
		for i := range t.kept {
			t.kept[i] = make([]float32, size)
		}
		t.scores, t.queries = make([]float32, scores), make([]float32, queries)
		return t
	}}
}

// Stack makes a stack model ready on h, which keeps none of its large weights. In a sequence, the
// rows of one of items are the positions of one item, and its attention has to be causal.
func Stack(h *Host, model *stack.Model) (engine.Model, error) {
	m, info := compile(model), model.Info()
	made := blocks.Model{Info: info, Bind: func(c engine.Call) (blocks.Bound, error) { return m.bind(c, h.workers.n) }}
	if m.Items {
		made.Begin = func(ctx context.Context, q engine.Sequence) (engine.State, error) { return h.begin(ctx, info, m, q) }
	}
	return h.engine.Model(made)
}

// bind ties the model to a call, which so many workers compute.
func (m *layers) bind(c engine.Call, workers int) (b blocks.Bound, err error) {
	y, positions, err := m.Bind(c)
	if err != nil {
		return b, err
	}
	p := pass{layers: m, x: c.Inputs[0].Desc, positions: positions, unit: tileRows, tiles: m.tiles}
	keys := positions
	if c.State != nil {
		p.sequence = c.State.(*sequence)
		if keys, err = p.sequence.room(c, positions); err != nil {
			return b, err
		}
	}
	p.in, _ = stack.FloatOf(p.x.DType) // as its port says; ids are none
	p.out, _ = stack.FloatOf(y.DType)
	if m.In == m.Out && m.Vocabulary == 0 && !m.Mask {
		b.Results = blocks.InPlace // a tile is read before it is written
	}
	if m.Items {
		p.unit = positions
	}
	if size, scores, queries := m.sizes(positions, keys); positions > tileRows || scores > tileRows*tileRows {
		p.tiles = m.newTiles(positions, keys, true) // memory of the call, and no more that of the model
		each := 4 * int64((2+m.Residuals)*size+scores+queries)
		b.Memory = []int64{each * min(int64(workers), p.x.Shape[0])}
	}
	b.Outs, b.Program = []tensor.Desc{y}, restingRows(p.compute)
	return b, nil
}

// pass is a stack model tied to a call.
type pass struct {
	*layers
	x               tensor.Desc
	in, out         stack.Float
	positions, unit int // rows of a tile in a row of the call, and in a tile
	tiles           *sync.Pool
	sequence        *sequence // nil: the call is of none
}

// compute takes a block through the layers, a tile at a time.
func (p pass) compute(ctx context.Context, b RowBlock) error {
	t := p.tiles.Get().(*tile)
	defer func() {
		t.past, t.cache = 0, nil
		p.tiles.Put(t)
	}()
	in, out := b.In[0], b.Out[0]
	item := b.Row // of the tile, where there are items
	for rows := int(b.Rows) * p.positions; rows > 0; rows -= p.unit {
		t.rows, t.width, t.depth = min(rows, p.unit), p.In, 0
		if q := p.sequence; q != nil {
			t.past, t.most, t.cache = q.past, q.most, q.cache
		}
		n := t.rows * p.In
		if p.table == nil {
			p.in.Load(t.x[:n], in)
			in = in[n*p.in.Bytes:]
		} else {
			ids := t.rows * p.x.DType.Bits() / 8
			err := p.IDs(p.x, item, in[:ids], func(i, id int) {
				copy(t.x[i*p.In:][:p.In], p.table[id*p.In:])
			})
			if err != nil {
				return err
			}
			in = in[ids:]
		}
		if p.Mask {
			t.mask = b.In[1][(item-b.Row)*int64(t.rows):][:t.rows]
		}
		for _, layer := range p.kernels {
			layer(ctx, t)
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
		}
		n = t.rows * p.Out
		p.out.Store(out, t.x[:n])
		out = out[n*p.out.Bytes:]
		item++
	}
	if p.sequence != nil {
		p.sequence.past += p.positions
	}
	return nil
}
