package blocks

import (
	"fmt"
	"math"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// plan is the arithmetic of one run, done before any memory is taken.
// All byte counts saturate, so that a size beyond 63 bits is refused by the budget.
type plan struct {
	rows, blockRows, blocks int64

	inRow  []int64 // bytes of one row, by input port; none for a Whole one
	outRow []int64 // bytes of one row, by output port
	whole  []int64 // bytes, by input port; none for one that is split

	wholeBytes        int64 // of all Whole inputs together, as a slab takes it
	inBlock, outBlock int64 // memory of one slot, as a slab takes it
	minIn, minOut     int64 // slots a run cannot do without
	wantIn, wantOut   int64 // slots it would like
	fixed             int64 // bytes that the model asks for beside blocks
	chunk             int64 // the largest of the inputs
}

// none marks a port that is not part of a block.
const none = -1

// newPlan lays out a call that Info.Check has accepted. b says what comes out, and
// without inputs how many rows there are.
func newPlan(info engine.Info, c engine.Call, rows int64, b Bound) (plan, error) {
	p := plan{
		rows:  rows,
		inRow: make([]int64, len(c.Inputs)), whole: make([]int64, len(c.Inputs)), outRow: make([]int64, len(info.Outputs)),
		minIn: 1, fixed: sum(b.Memory),
	}
	var widest, chunk int64 // of the split ports
	var chunkRows int64     // rows in a chunk of the first split input, 0 if that is no whole number
	fewest := int64(1)      // rows per block, so that a chunk spans at most some blocks
	some := int64(chunkSlots)
	if info.BlockRows > 0 {
		some = maxSlots / 4
	}
	first := true
	for i, in := range c.Inputs {
		n, err := in.Desc.Bytes()
		if err != nil {
			return plan{}, err
		}
		if info.Inputs[i].Whole {
			p.inRow[i], p.whole[i] = none, n
			p.wholeBytes = add(p.wholeBytes, align(n))
			continue
		}
		if _, p.inRow[i], err = in.Desc.Rows(info.Axes(len(in.Desc.Shape))); err != nil {
			return plan{}, err
		}
		p.whole[i] = none
		widest = max(widest, p.inRow[i])
		chunk = max(chunk, in.ChunkBytes)
		if w := p.inRow[i]; w > 0 {
			fewest = max(fewest, ceil(ceil(min(in.ChunkBytes, n), some), w))
			if first && in.ChunkBytes%w == 0 {
				chunkRows = in.ChunkBytes / w
			}
		}
		first = false
	}
	if err := p.outputs(info, b); err != nil {
		return plan{}, err
	}
	for _, w := range p.outRow {
		widest = max(widest, w)
		if len(c.Inputs) == 0 && w > 0 {
			chunk = engine.ChunkBytes
			fewest = max(fewest, ceil(ceil(min(chunk, mul(p.rows, w)), chunkSlots), w))
		}
	}
	rows = p.rows

	// Of rows that nobody chose, a block has about what a core's second-level cache holds, and of
	// chunks of the default size one is a block.
	switch bound := max(1, engine.ChunkBytes/max(widest, 1)); {
	case info.BlockRows > 0:
		p.blockRows = info.BlockRows
	case widest == 0:
		p.blockRows = rows
	case chunkRows > 0 && chunkRows <= bound:
		p.blockRows = chunkRows
	default:
		p.blockRows = bound
	}
	if b.MostRows > 0 {
		p.blockRows = min(p.blockRows, b.MostRows)
	}
	p.blockRows = max(1, min(max(p.blockRows, fewest), rows))
	p.blocks = max(1, ceil(rows, p.blockRows))

	held := min(p.blockRows, rows) // 0 when there are no rows
	for i, in := range c.Inputs {
		if info.Inputs[i].Whole {
			continue
		}
		block := mul(held, p.inRow[i])
		p.inBlock = add(p.inBlock, align(block))
		chunk := min(in.ChunkBytes, mul(rows, p.inRow[i]))
		if b.Results != Own && block > 0 && chunk%block != 0 {
			// The results of one chunk are kept until it is complete, and their last
			// block waits in the same slots for the chunk of input with its end: the
			// next one, or where blocks are larger, one that comes later.
			chunk = add(chunk, max(chunk, block))
		}
		p.minIn = max(p.minIn, spans(chunk, block))
	}
	p.inBlock = slabBytes(p.inBlock)
	p.wholeBytes = slabBytes(p.wholeBytes)
	p.minIn, p.wantIn = p.slots(p.minIn, p.inBlock)
	p.chunk = chunk
	switch b.Results {
	case Own:
		p.outBlock = slabBytes(p.results())
		p.minOut, p.wantOut = p.slots(p.minOut, p.outBlock)
	case Given:
		p.window()
	}
	return p, nil
}

// results finds the fewest blocks whose results cover a chunk; it returns the bytes of one.
func (p *plan) results() (bytes int64) {
	held := min(p.blockRows, p.rows)
	for _, w := range p.outRow {
		block := mul(held, w)
		bytes = add(bytes, align(block))
		p.minOut = max(p.minOut, spans(min(p.chunk, mul(p.rows, w)), block))
	}
	return bytes
}

// window says how many blocks may have results that are Given, which have no memory of
// the run's. Before their width is known, they are taken to be as wide as the input.
func (p *plan) window() {
	p.minOut = p.minIn
	bytes := p.results()
	if bytes == 0 {
		bytes = p.inBlock
	}
	p.minOut, p.wantOut = p.slots(p.minOut, bytes)
}

// outputs fills in what b says of the outputs.
func (p *plan) outputs(info engine.Info, b Bound) error {
	if b.Outs == nil && b.Results == Given && (info.Rows == 0 || len(info.Inputs) > 0) { // known when they are given
		if info.Rows == 0 {
			p.rows = 1
		}
		return nil
	}
	err := p.describe(info, b.Outs)
	if in := sum(p.inRow); err == nil && b.Results == InPlace && (len(b.Outs) != 1 || in != p.outRow[0]) {
		err = fmt.Errorf("computes in place, but rows of %d bytes become %d outputs of %d", in, len(b.Outs), p.outRow[0])
	}
	if err != nil {
		return fmt.Errorf("%w: %q: %w", engine.ErrModel, info.Name, err)
	}
	return nil
}

// describe fills in outRow, and rows where no input tells them, if the info allows outs.
func (p *plan) describe(info engine.Info, outs []tensor.Desc) error {
	if len(outs) != len(info.Outputs) {
		return fmt.Errorf("describes %d outputs, its info says %d", len(outs), len(info.Outputs))
	}
	for i, d := range outs {
		port := info.Outputs[i]
		if err := port.Check(d); err != nil {
			return err
		}
		rows, width, err := d.Rows(info.Axes(len(d.Shape)))
		if err != nil {
			return fmt.Errorf("output %q: %w", port.Name, err)
		}
		if i == 0 && len(info.Inputs) == 0 {
			p.rows = rows
		}
		if rows != p.rows {
			return fmt.Errorf("output %q has %d rows, the call has %d", port.Name, rows, p.rows)
		}
		p.outRow[i] = width
	}
	return nil
}

// slots turns the fewest slots that cover a chunk into what to take at least
// and what to aim at: no more than there are blocks.
func (p *plan) slots(least, bytes int64) (minimum, want int64) {
	least = min(least, maxSlots)
	want = max(least, preferredSlots, min(preferredBytes/max(bytes, 1), chunkSlots))
	return min(least, p.blocks), min(want, p.blocks)
}

// least is the memory a run cannot do without.
func (p *plan) least() int64 {
	return sum([]int64{p.wholeBytes, p.fixed, mul(p.minIn, p.inBlock), mul(p.minOut, p.outBlock)})
}

// span returns the first row and the number of rows of a block.
func (p *plan) span(index int64) (row, rows int64) {
	row = index * p.blockRows
	return row, min(p.blockRows, p.rows-row)
}

// spans is how many blocks hold one chunk that starts anywhere, and one more to
// work on meanwhile where a chunk is a block.
func spans(chunk, block int64) int64 {
	if block == 0 {
		return 1
	}
	return ceil(chunk, block) + 1
}

func ceil(n, by int64) int64 { return n/by + min(n%by, 1) }

// slabBytes is what the host takes from its pool for n bytes.
func slabBytes(n int64) int64 {
	if n == 0 {
		return 0
	}
	return slab.SizeOf(n)
}

// align rounds up to a cache line, where a port starts in a slot: that is right for any element type.
func align(n int64) int64 { return add(n, 63) &^ 63 }

func add(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

func mul(a, b int64) int64 {
	if b > 0 && a > math.MaxInt64/b {
		return math.MaxInt64
	}
	return a * b
}

// carve cuts mem into one view per port, rows of width bytes each. A port of width none
// gets no view, one of 0 bytes an empty one.
func carve(mem []byte, views [][]byte, width []int64, rows int64) {
	for i, w := range width {
		switch n := w * rows; {
		case w == none:
			views[i] = nil
		case n == 0:
			views[i] = []byte{}
		default:
			views[i] = mem[:n:n]
			mem = mem[align(n):]
		}
	}
}

// sum adds sizes, of which that of no port counts nothing.
func sum(sizes []int64) (n int64) {
	for _, size := range sizes {
		n = add(n, max(size, 0))
	}
	return n
}
