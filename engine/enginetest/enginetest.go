// Package enginetest is the suite that every engine passes, and the driver it is made of. It
// plays the part of whoever serves a model: chunks of any size arrive in any order, results
// are kept until the chunks they belong to are complete.
//
// It refuses to know how an engine computes. Only tests call it; the memory that it
// fills is borrowed from the model.
package enginetest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

const (
	// deadline makes a deadlock a failure; nothing here takes a second.
	deadline = 60 * time.Second
	// memory is what a model gets where the amount is not what is tested.
	memory = 64 << 20
)

// Subject is a model made ready for one test.
type Subject struct {
	Model engine.Model
	// Idle says what the model still holds when all runs are closed, nil for nothing.
	Idle func() error
}

// Case is a model and what to expect of it.
type Case struct {
	// New makes the model with so many bytes of memory for its runs.
	New func(t testing.TB, memory int64) Subject
	// Inputs are one tensor for each input port, if any, best of a few thousand rows.
	Inputs []tensor.Tensor
	// Empty and Scalar, if set, are inputs without rows and of rank 0.
	Empty, Scalar []tensor.Tensor
	Params        map[string]string
	// Want is the oracle: results are compared bit for bit, unless Near is set.
	Want func(in []tensor.Tensor) ([]tensor.Tensor, error)
	// Near, if it is not 0, is how far a float32 or float64 may be from Want's, as a part of
	// that or of 1 if that is less. However the input was cut, results are still the same.
	Near float64
}

// Host is what models run on: cpu.Host is one.
type Host interface {
	Pool() *slab.Pool
	Budget() *slab.Budget
	Close()
}

// On makes a Case.New for a model on a host of so many bytes of memory.
func On[H Host](host func(memory int64) H, build func(H) (engine.Model, error)) func(testing.TB, int64) Subject {
	return func(t testing.TB, memory int64) Subject {
		t.Helper()
		h := host(memory)
		t.Cleanup(h.Close)
		m, err := build(h)
		require.NoError(t, err)
		return Subject{m, func() error {
			used, _, _ := h.Budget().Used()
			if slabs, live := h.Pool().Live(); used != 0 || slabs != 0 {
				return fmt.Errorf("%d bytes of the budget and %d slabs of %d bytes are still held", used, slabs, live)
			}
			return nil
		}}
	}
}

// Call describes inputs, which it borrows, to a model: they arrive in chunks of a size.
func Call(m engine.Model, in []tensor.Tensor, params map[string]string, chunk int64) engine.Call {
	c := engine.Call{ID: tensor.ID{1}, Params: params}
	for i, p := range m.Info().Inputs {
		c.Inputs = append(c.Inputs, engine.Input{Port: p.Name, Desc: in[i].Desc, ChunkBytes: chunk})
	}
	return c
}

// Compute runs a model on whole tensors and returns copies of its outputs. Chunks
// of chunk bytes arrive in an order drawn from seed, ascending if seed is 0, and
// results are released when the chunks they lie in are complete.
func Compute(ctx context.Context, m engine.Model, in []tensor.Tensor, params map[string]string, chunk int64, seed uint64) (out []tensor.Tensor, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, deadline, errors.New("enginetest: no result in time"))
	defer cancel()
	r, err := m.Open(ctx, Call(m, in, params, chunk))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var wg sync.WaitGroup
	var lent int64
	var wrong error
	wg.Go(func() {
		if lent, wrong = feed(ctx, m.Info(), r, in, chunk, seed); wrong != nil {
			stop(wrong)
		}
	})
	if out, err = collect(ctx, m.Info(), r, chunk); err != nil {
		stop(err)
	}
	wg.Wait() // feed has nothing left to wait for
	if n := r.Stats().Blocks; err == nil && wrong == nil && n != lent && len(in) > 0 {
		wrong = fmt.Errorf("stats count %d blocks, %d were lent", n, lent)
	}
	return out, cmp.Or(err, wrong)
}

// feed sends every chunk once, as soon as the blocks it lies in are lent: of those that could
// go, any, or the first if seed is 0. It returns how many blocks of rows there were.
func feed(ctx context.Context, info engine.Info, r engine.Run, in []tensor.Tensor, chunk int64, seed uint64) (n int64, err error) {
	type piece struct {
		port   int
		lo, hi int64
	}
	rng := rand.New(rand.NewPCG(seed, 0))
	width := make([]int64, len(in)) // bytes per row
	reach := make([]int64, len(in)) // bytes lent so far
	var waiting []piece
	for p, t := range in {
		if !info.Inputs[p].Whole {
			_, width[p], _ = t.Rows(info.Axes(len(t.Shape)))
		}
		for lo := int64(0); lo < int64(len(t.Data)); lo += chunk {
			waiting = append(waiting, piece{p, lo, min(lo+chunk, int64(len(t.Data)))})
		}
	}

	blocks := make(chan *engine.Block)
	var failed error // is there when blocks is closed
	go func() {      // ends with the last block, the run or ctx
		defer close(blocks)
		failed = borrow(ctx, info, r, in, blocks)
	}()
	now := make(chan struct{})
	close(now)
	var lent []*engine.Block
	missing := make(map[*engine.Block]int64) // bytes, of those that are lent
	for len(waiting) > 0 || blocks != nil {
		can := -1
		for i, w := range waiting {
			if w.hi <= reach[w.port] && (can < 0 || seed > 0 && rng.IntN(3) == 0) {
				can = i
			}
		}
		send := now
		if can < 0 {
			send = nil
		}
		if send == nil && blocks == nil {
			return n, errors.New("chunks are left over after the last block")
		}
		select {
		case <-ctx.Done():
			return n, nil // collect knows why
		case b, more := <-blocks:
			if !more {
				blocks = nil
				if failed != nil {
					return n, failed
				}
				continue
			}
			lent = append(lent, b)
			if !b.Whole {
				n++
			}
			for p, mem := range b.In {
				if inside := mem != nil; inside != (info.Inputs[p].Whole == b.Whole) {
					return n, fmt.Errorf("block at row %d: port %q is part of it: %v", b.Row, info.Inputs[p].Name, inside)
				}
				if info.Rows == 0 && mem != nil && len(mem) != len(in[p].Data) {
					return n, fmt.Errorf("the block has %d bytes of port %q in one piece, of %d", len(mem), info.Inputs[p].Name, len(in[p].Data))
				}
				missing[b] += int64(len(mem))
				reach[p] += int64(len(mem))
			}
		case <-send:
			w := waiting[can]
			waiting = slices.Delete(waiting, can, can+1)
			for _, b := range lent {
				mem, at := b.In[w.port], b.Row*width[w.port]
				if lo, hi := max(w.lo, at), min(w.hi, at+int64(len(mem))); lo < hi {
					missing[b] -= int64(copy(mem[lo-at:hi-at], in[w.port].Data[lo:hi]))
				}
			}
		}
		lent = slices.DeleteFunc(lent, func(b *engine.Block) bool {
			if missing[b] == 0 {
				r.Filled(b)
			}
			return missing[b] == 0
		})
	}
	return n, nil
}

// borrow passes on all blocks of a run: that of the Whole inputs, then all rows in order.
func borrow(ctx context.Context, info engine.Info, r engine.Run, in []tensor.Tensor, blocks chan<- *engine.Block) error {
	whole := slices.ContainsFunc(info.Inputs, func(p engine.Port) bool { return p.Whole })
	row := int64(0)
	for {
		b, err := r.Borrow(ctx)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if b.Whole != whole || !b.Whole && b.Row != row {
			return fmt.Errorf("a block is whole: %v, at row %d; want row %d", b.Whole, b.Row, row)
		}
		whole = false
		row += b.Rows
		select {
		case blocks <- b:
		case <-ctx.Done():
			return nil
		}
	}
	if _, err := r.Borrow(ctx); !errors.Is(err, io.EOF) {
		return errors.Join(errors.New("after the last block, Borrow did not return io.EOF"), err)
	}
	for p, port := range info.Inputs {
		if rows, _, err := in[p].Rows(info.Axes(len(in[p].Shape))); !port.Whole && (err != nil || rows != row) {
			return errors.Join(fmt.Errorf("the blocks hold %d rows, port %q has %d", row, port.Name, rows), err)
		}
	}
	return nil
}

// output is what has come of one.
type output struct {
	tensor.Tensor
	seen    []bool       // by byte
	missing []int64      // bytes, by chunk
	kept    []engine.Out // until the chunks they lie in are complete
}

// collect takes every result and fails unless each byte came exactly once.
func collect(ctx context.Context, info engine.Info, r engine.Run, chunk int64) ([]tensor.Tensor, error) {
	outs := make([]output, len(info.Outputs))
	defer func() {
		for _, out := range outs {
			for _, o := range out.kept {
				o.Release()
			}
		}
	}()
	for {
		o, err := r.Next(ctx)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		if err := outs[o.Port].take(o, chunk); err != nil {
			return nil, fmt.Errorf("output %d: %w", o.Port, err)
		}
	}
	all := make([]tensor.Tensor, len(outs))
	for p, out := range outs {
		if out.seen == nil {
			return nil, fmt.Errorf("output %q never came", info.Outputs[p].Name)
		}
		if at := slices.Index(out.seen, false); at >= 0 {
			return nil, fmt.Errorf("output %q ended without its byte %d", info.Outputs[p].Name, at)
		}
		all[p] = out.Tensor
	}
	return all, nil
}

func (t *output) take(o engine.Out, chunk int64) error {
	t.kept = append(t.kept, o)
	if t.seen == nil {
		n, err := o.Desc.Bytes()
		if err != nil {
			return err
		}
		t.Tensor, t.seen = tensor.Tensor{Desc: o.Desc.Clone(), Data: make([]byte, n)}, make([]bool, n)
		for lo := int64(0); lo < n; lo += chunk {
			t.missing = append(t.missing, min(chunk, n-lo))
		}
	}
	if !o.Desc.Equal(t.Desc) {
		return fmt.Errorf("it is %v in one piece and %v in another", t.Desc, o.Desc)
	}
	if o.Off < 0 || int64(len(o.Data)) > int64(len(t.Data))-o.Off {
		return fmt.Errorf("piece [%d,+%d) of %d bytes", o.Off, len(o.Data), len(t.Data))
	}
	copy(t.Data[o.Off:], o.Data)
	for at := o.Off; at < o.Off+int64(len(o.Data)); at++ {
		if t.seen[at] {
			return fmt.Errorf("byte %d came twice", at)
		}
		t.seen[at] = true
		t.missing[at/chunk]--
	}
	t.kept = slices.DeleteFunc(t.kept, func(o engine.Out) bool {
		for c := o.Off / chunk; c*chunk < o.Off+int64(len(o.Data)); c++ {
			if t.missing[c] > 0 {
				return false
			}
		}
		o.Release()
		return true
	})
	return nil
}

// Equal returns where two lists of tensors, both lent, first differ, or nil.
func Equal(got, want []tensor.Tensor) error { return near(got, want, 0) }

// near says where two lists of tensors, both lent, are further apart than part of
// the wanted value, or of 1 if that is less. Where part is 0, bytes are compared.
func near(got, want []tensor.Tensor, part float64) error {
	if len(got) != len(want) {
		return fmt.Errorf("%d tensors, want %d", len(got), len(want))
	}
	for i, g := range got {
		w := want[i]
		if !g.Desc.Equal(w.Desc) {
			return fmt.Errorf("output %d is %v, want %v", i, g.Desc, w.Desc)
		}
		if part == 0 {
			for at, b := range w.Data {
				if g.Data[at] != b {
					return fmt.Errorf("output %d differs from byte %d of %d on", i, at, len(w.Data))
				}
			}
			continue
		}
		gs, bad := floats(g)
		ws, worse := floats(w)
		if err := errors.Join(bad, worse); err != nil {
			return err
		}
		for at, w := range ws {
			if off := math.Abs(gs[at] - w); off > part*max(1, math.Abs(w)) || math.IsNaN(gs[at]) != math.IsNaN(w) {
				return fmt.Errorf("output %d, element %d is %v, want %v", i, at, gs[at], w)
			}
		}
	}
	return nil
}

// floats copies the elements of a tensor of float32 or float64.
func floats(t tensor.Tensor) ([]float64, error) {
	if t.DType == tensor.Float64 {
		return tensor.Slice[float64](t)
	}
	narrow, err := tensor.Slice[float32](t)
	wide := make([]float64, len(narrow))
	for i, v := range narrow {
		wide[i] = float64(v)
	}
	return wide, err
}
