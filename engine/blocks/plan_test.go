package blocks

import (
	"math"
	"testing"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/tensor"
)

const mib = 1 << 20

func planOf(t *testing.T, info engine.Info, in tensor.Desc, chunk int64, b Bound) plan {
	t.Helper()
	c := engine.Call{Inputs: []engine.Input{{Port: "x", Desc: in, ChunkBytes: chunk}}}
	rows, err := info.Check(c)
	if err != nil {
		t.Fatal(err)
	}
	p, err := newPlan(info, c, rows, b)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestBlocksAreAsLongAsChunksWhereRowsAllowIt(t *testing.T) {
	f32 := func(shape ...int64) tensor.Desc { return tensor.Desc{DType: tensor.Float32, Shape: shape} }
	for name, c := range map[string]struct {
		info  engine.Info
		in    tensor.Desc
		out   tensor.Desc
		chunk int64
		want  int64
	}{
		"elementwise, one chunk":           {engine.Info{Rows: engine.AllAxes}, f32(1 << 24), f32(1 << 24), mib, 1 << 18},
		"elementwise, small chunks":        {engine.Info{Rows: engine.AllAxes}, f32(1 << 24), f32(1 << 24), 4 * (1 << 10), 1 << 10},
		"chunks of no whole rows":          {engine.Info{Rows: engine.AllAxes}, f32(1 << 24), f32(1 << 24), mib - 1, 1 << 18},
		"chunks over the bound":            {engine.Info{Rows: engine.AllAxes}, f32(1 << 24), f32(1 << 24), 4 * mib, 1 << 18},
		"rows that do not divide a chunk":  {engine.Info{Rows: engine.AllButLast}, f32(10000, 784), f32(10000, 10), mib, mib / 3136},
		"the widest port counts":           {engine.Info{Rows: engine.AllButLast}, f32(10000, 10), f32(10000, 784), mib, mib / 3136},
		"rows longer than the bound":       {engine.Info{Rows: 1}, f32(100, mib), f32(100, mib), mib, 1},
		"rows of no bytes":                 {engine.Info{Rows: 1}, f32(100, 0), f32(100, 0), mib, 100},
		"no rows":                          {engine.Info{Rows: 1}, f32(0, 9), f32(0, 9), mib, 1},
		"fewer rows than a block":          {engine.Info{Rows: 1}, f32(3, 9), f32(3, 9), mib, 3},
		"the whole tensor":                 {engine.Info{}, f32(3, 9), f32(3, 9), 4, 1},
		"preferred rows":                   {engine.Info{Rows: 1, BlockRows: 50}, f32(10000, 784), f32(10000, 784), mib, 50},
		"preferred rows, too few":          {engine.Info{Rows: engine.AllAxes, BlockRows: 1}, f32(1 << 20), f32(1 << 20), mib, 1 << 7},
		"rows one by one":                  {engine.Info{Rows: 1, BlockRows: 1}, f32(10000, 128), f32(10000, 128), mib, 1},
		"preferred rows of a small tensor": {engine.Info{Rows: engine.AllAxes, BlockRows: 1}, f32(64), f32(64), mib, 1},
	} {
		t.Run(name, func(t *testing.T) {
			c.info.Inputs = []engine.Port{{Name: "x", Shape: []int64{engine.AnyAxes}}}
			c.info.Outputs = []engine.Port{{Name: "y", Shape: []int64{engine.AnyAxes}}}
			p := planOf(t, c.info, c.in, c.chunk, Bound{Outs: []tensor.Desc{c.out}})
			if p.blockRows != c.want {
				t.Errorf("%d rows per block, want %d", p.blockRows, c.want)
			}
			if n := (p.blocks - 1) * p.blockRows; p.rows > 0 && (n >= p.rows || n+p.blockRows < p.rows) {
				t.Errorf("%d blocks of %d rows for %d", p.blocks, p.blockRows, p.rows)
			}
		})
	}
}

func TestABoundBlockHasAtMostItsRowsUnlessAChunkIsOfTooMany(t *testing.T) {
	f32 := func(shape ...int64) tensor.Desc { return tensor.Desc{DType: tensor.Float32, Shape: shape} }
	for name, c := range map[string]struct {
		in             tensor.Desc
		chosen         int64 // by the model
		most, chunk, n int64
	}{
		"no bound":                {f32(10000, 784), 0, 0, mib, mib / 3136},
		"fewer than would be":     {f32(10000, 784), 0, 50, mib, 50},
		"more than would be":      {f32(10000, 784), 0, 5000, mib, mib / 3136},
		"fewer than are chosen":   {f32(10000, 784), 70, 50, mib, 50},
		"too few for their bytes": {f32(1<<20, 1), 0, 1, mib, 1 << 12},
	} {
		t.Run(name, func(t *testing.T) {
			port := []engine.Port{{Name: "x", Shape: []int64{engine.AnyAxes}}}
			info := engine.Info{Rows: 1, BlockRows: c.chosen, Inputs: port, Outputs: port}
			p := planOf(t, info, c.in, c.chunk, Bound{Outs: []tensor.Desc{c.in}, MostRows: c.most})
			if p.blockRows != c.n {
				t.Errorf("%d rows per block, want %d", p.blockRows, c.n)
			}
		})
	}
}

func TestALargeTensorNeedsAFewBlocksOnly(t *testing.T) {
	info := engine.Info{Rows: engine.AllAxes, Inputs: []engine.Port{{Name: "x", Shape: []int64{engine.AnyAxes}}}, Outputs: []engine.Port{{Name: "y", Shape: []int64{engine.AnyAxes}}}}
	huge := tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{1 << 40}}
	p := planOf(t, info, huge, mib, Bound{Outs: []tensor.Desc{huge}, Results: InPlace})
	if least := p.least(); least != 2*mib {
		t.Errorf("in place at least %d bytes, want 2 MiB", least)
	}
	p = planOf(t, info, huge, mib, Bound{Outs: []tensor.Desc{huge}})
	if least := p.least(); least != 4*mib || p.wantIn != preferredSlots || p.wantOut != preferredSlots {
		t.Errorf("at least %d bytes, wanted %d and %d slots", least, p.wantIn, p.wantOut)
	}
	whole := info
	whole.Rows = 0
	enormous := tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{1 << 40, 1 << 20}}
	p = planOf(t, whole, enormous, mib, Bound{Outs: []tensor.Desc{enormous}, Memory: []int64{math.MaxInt64}})
	if least := p.least(); least != math.MaxInt64 {
		t.Errorf("a size beyond 63 bits became %d", least)
	}
}

// FuzzPlan holds every plan to what run relies on: blocks cover the rows once, a
// chunk fits the slots wherever it starts, memory is what the slots add up to.
func FuzzPlan(f *testing.F) {
	f.Add(int64(10000), int64(784), int64(10), int64(1<<20), int64(0), false)
	f.Add(int64(3), int64(1), int64(1), int64(7), int64(2), true)
	f.Add(int64(0), int64(0), int64(5), int64(1), int64(1), false)
	f.Fuzz(func(t *testing.T, rows, in, out, chunk, blockRows int64, inPlace bool) {
		if rows < 0 || in < 0 || out < 0 || chunk < 1 || blockRows < 0 || rows > tensor.MaxDim || in > tensor.MaxDim || out > tensor.MaxDim {
			t.Skip("no tensor has such a size: the descs are checked before a plan is made")
		}
		if inPlace {
			out = in
		}
		info := engine.Info{Rows: 1, BlockRows: blockRows, Inputs: []engine.Port{{Name: "x", Shape: []int64{engine.AnyAxes}}}, Outputs: []engine.Port{{Name: "y", Shape: []int64{engine.AnyAxes}}}}
		c := engine.Call{Inputs: []engine.Input{{Port: "x", Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{rows, in}}, ChunkBytes: chunk}}}
		n, err := info.Check(c)
		if err != nil {
			return // beyond 63 bits
		}
		p, err := newPlan(info, c, n, Bound{Outs: []tensor.Desc{{DType: tensor.Uint8, Shape: tensor.Shape{rows, out}}}, Results: map[bool]Results{true: InPlace}[inPlace]})
		if err != nil {
			return
		}
		row, last := p.span(p.blocks - 1)
		if p.blockRows < 1 || row+last != rows || last < 0 || last == 0 && rows > 0 {
			t.Fatalf("the last of %d blocks of %d rows is [%d,+%d) of %d", p.blocks, p.blockRows, row, last, rows)
		}
		if p.minIn < 1 || p.minIn > p.wantIn || p.wantIn > min(p.blocks, maxSlots) || p.minOut > p.wantOut || p.wantOut > maxSlots {
			t.Fatalf("slots: %d to %d in, %d to %d out", p.minIn, p.wantIn, p.minOut, p.wantOut)
		}
		covers := func(slots, width int64, chunks int64) bool {
			block := mul(p.blockRows, width)
			if slots == p.blocks || slots == maxSlots || block == 0 {
				return true
			}
			need := mul(chunk, chunks)
			if inPlace && chunk%block == 0 {
				need = chunk // chunks are whole blocks: none straddles
			}
			// One that starts at the last byte of a block.
			return ceil(need-1, block)+1 <= slots
		}
		if chunks := map[bool]int64{true: 2, false: 1}[inPlace]; !covers(p.minIn, in, chunks) {
			t.Fatalf("%d slots of %d rows of %d bytes do not hold chunks of %d", p.minIn, p.blockRows, in, chunk)
		}
		if !inPlace && !covers(p.minOut, out, 1) {
			t.Fatalf("%d result slots of %d rows of %d bytes do not hold chunks of %d", p.minOut, p.blockRows, out, chunk)
		}
		if held := mul(min(p.blockRows, rows), in); p.inBlock != slabBytes(align(held)) {
			t.Fatalf("a slot of %d bytes for %d", p.inBlock, held)
		}
	})
}
