// Package enginetest is the suite that every engine passes, and the driver it
// is made of. It plays the part of whoever serves a model: chunks of any size
// arrive in any order, results are kept until the chunks they belong to are
// complete.
//
// It refuses to know how an engine computes. Only tests call it; the memory that it
// fills is borrowed from the model.
package enginetest

import (
	"bytes"
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
	// Idle says what the model still holds, nil for nothing. It is asked when
	// every run has been closed.
	Idle func() error
}

// Case is a model and what to expect of it.
type Case struct {
	// New makes the model with so many bytes of memory for its runs.
	New func(t testing.TB, memory int64) Subject
	// Inputs are one tensor for each input port, best of a few thousand rows. A
	// model without inputs has none here either.
	Inputs []tensor.Tensor
	// Empty and Scalar, if set, are inputs without rows and of rank 0.
	Empty, Scalar []tensor.Tensor
	Params        map[string]string
	// Want is the oracle: results are compared bit for bit, unless Near is set.
	Want func(in []tensor.Tensor) ([]tensor.Tensor, error)
	// Near, if it is not 0, is how far a float32 or float64 may be from Want's, as a
	// part of that or of 1 if that is less. Results are still bit for bit the same
	// however the input was cut.
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
		if err != nil {
			t.Fatal(err)
		}
		return Subject{m, func() error {
			used, _, _ := h.Budget().Used()
			if slabs, live := h.Pool().Live(); used != 0 || slabs != 0 {
				return fmt.Errorf("%d bytes of the budget and %d slabs of %d bytes are still held", used, slabs, live)
			}
			return nil
		}}
	}
}

// Call describes inputs to a model, arriving in chunks of the given size. It
// borrows in only to describe it.
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
	defer wg.Wait()
	wg.Go(func() {
		if err := feed(ctx, m.Info(), r, in, chunk, seed); err != nil {
			stop(err)
		}
	})
	out, err = collect(ctx, m.Info(), r, chunk)
	stop(err) // feed has nothing left to wait for
	return out, err
}

// feed sends every chunk once, as soon as the blocks it lies in are lent: of
// those that could go, any, or the first if seed is 0.
func feed(ctx context.Context, info engine.Info, r engine.Run, in []tensor.Tensor, chunk int64, seed uint64) error {
	type lent struct {
		*engine.Block
		missing int64
	}
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
	failed := make(chan error, 1)
	go func() { // ends with the last block, the run or ctx
		defer close(blocks)
		for row := int64(0); ; {
			b, err := r.Borrow(ctx)
			if err != nil {
				if !errors.Is(err, io.EOF) {
					failed <- err
				}
				return
			}
			if b.Row != row && !b.Whole {
				failed <- fmt.Errorf("row %d was lent after row %d", b.Row, row)
				return
			}
			row += b.Rows
			select {
			case blocks <- b:
			case <-ctx.Done():
				return
			}
		}
	}()

	var open []*lent
	accept := func(b *engine.Block) error {
		l := &lent{Block: b}
		for p, mem := range b.In {
			if inside := mem != nil; inside != (info.Inputs[p].Whole == b.Whole) {
				return fmt.Errorf("block at row %d: port %q is part of it: %v", b.Row, info.Inputs[p].Name, inside)
			}
			l.missing += int64(len(mem))
			reach[p] += int64(len(mem))
		}
		if l.missing == 0 {
			r.Filled(b)
			return nil
		}
		open = append(open, l)
		return nil
	}
	for len(waiting) > 0 || blocks != nil {
		can := -1
		for i, w := range waiting {
			if w.hi <= reach[w.port] && (can < 0 || seed > 0 && rng.IntN(3) == 0) {
				can = i
			}
		}
		var b *engine.Block
		more := true
		if can >= 0 {
			select {
			case b, more = <-blocks:
			default:
			}
		} else if blocks != nil {
			select {
			case b, more = <-blocks:
			case <-ctx.Done():
				return nil // collect knows why
			}
		} else {
			return errors.New("chunks are left over after the last block")
		}
		if !more {
			blocks = nil
			select {
			case err := <-failed:
				return err
			default:
			}
		}
		if b != nil {
			if err := accept(b); err != nil {
				return err
			}
		}
		if can < 0 {
			continue
		}
		w := waiting[can]
		waiting = slices.Delete(waiting, can, can+1)
		for _, l := range slices.Clone(open) {
			at := l.Row * width[w.port]
			lo, hi := max(w.lo, at), min(w.hi, at+int64(len(l.In[w.port])))
			if lo >= hi {
				continue
			}
			l.missing -= int64(copy(l.In[w.port][lo-at:hi-at], in[w.port].Data[lo:hi]))
			if l.missing == 0 {
				open = slices.DeleteFunc(open, func(o *lent) bool { return o == l })
				r.Filled(l.Block)
			}
		}
	}
	return nil
}

// collect takes every result and fails unless each byte came exactly once.
func collect(ctx context.Context, info engine.Info, r engine.Run, chunk int64) ([]tensor.Tensor, error) {
	type held struct {
		lo, hi  int64
		release func()
	}
	out := make([]tensor.Tensor, len(info.Outputs))
	seen := make([][]bool, len(out))
	missing := make([][]int64, len(out)) // by chunk
	kept := make([][]held, len(out))
	defer func() {
		for _, port := range kept {
			for _, h := range port {
				h.release()
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
		kept[o.Port] = append(kept[o.Port], held{o.Off, o.Off + int64(len(o.Data)), o.Release})
		t := &out[o.Port]
		if seen[o.Port] == nil {
			n, err := o.Desc.Bytes()
			if err != nil {
				return nil, err
			}
			*t = tensor.Tensor{Desc: o.Desc.Clone(), Data: make([]byte, n)}
			seen[o.Port] = make([]bool, n)
			for lo := int64(0); lo < n; lo += chunk {
				missing[o.Port] = append(missing[o.Port], min(chunk, n-lo))
			}
		}
		if !o.Desc.Equal(t.Desc) {
			return nil, fmt.Errorf("output %d is %v in one piece and %v in another", o.Port, t.Desc, o.Desc)
		}
		if o.Off < 0 || int64(len(o.Data)) > int64(len(t.Data))-o.Off {
			return nil, fmt.Errorf("output %d: piece [%d,+%d) of %d bytes", o.Port, o.Off, len(o.Data), len(t.Data))
		}
		copy(t.Data[o.Off:], o.Data)
		for i := range o.Data {
			at := o.Off + int64(i)
			if seen[o.Port][at] {
				return nil, fmt.Errorf("output %d: byte %d came twice", o.Port, at)
			}
			seen[o.Port][at] = true
			missing[o.Port][at/chunk]--
		}
		kept[o.Port] = slices.DeleteFunc(kept[o.Port], func(h held) bool {
			for c := h.lo / chunk; c*chunk < h.hi; c++ {
				if missing[o.Port][c] > 0 {
					return false
				}
			}
			h.release()
			return true
		})
	}
	for p := range out {
		if seen[p] == nil {
			return nil, fmt.Errorf("output %q never came", info.Outputs[p].Name)
		}
		if at := slices.Index(seen[p], false); at >= 0 {
			return nil, fmt.Errorf("output %q ended without its byte %d", info.Outputs[p].Name, at)
		}
	}
	return out, nil
}

// Equal says where two lists of tensors, both lent, differ first, nil for nowhere.
func Equal(got, want []tensor.Tensor) error {
	if len(got) != len(want) {
		return fmt.Errorf("%d tensors, want %d", len(got), len(want))
	}
	for i := range got {
		if !got[i].Desc.Equal(want[i].Desc) {
			return fmt.Errorf("output %d is %v, want %v", i, got[i].Desc, want[i].Desc)
		}
		if !bytes.Equal(got[i].Data, want[i].Data) {
			at := 0
			for at < len(want[i].Data) && got[i].Data[at] == want[i].Data[at] {
				at++
			}
			return fmt.Errorf("output %d differs from byte %d of %d on", i, at, len(want[i].Data))
		}
	}
	return nil
}

// near says where two lists of tensors, both lent, are further apart than part of
// the wanted value, or of 1 if that is less.
func near(got, want []tensor.Tensor, part float64) error {
	for i := range min(len(got), len(want)) {
		gs, err := floats(got[i])
		if err != nil {
			return err
		}
		ws, err := floats(want[i])
		if err != nil {
			return err
		}
		if !got[i].Desc.Equal(want[i].Desc) {
			return fmt.Errorf("output %d is %v, want %v", i, got[i].Desc, want[i].Desc)
		}
		for at, w := range ws {
			if off := math.Abs(gs[at] - w); off > part*max(1, math.Abs(w)) || math.IsNaN(gs[at]) != math.IsNaN(w) {
				return fmt.Errorf("output %d, element %d is %v, want %v", i, at, gs[at], w)
			}
		}
	}
	if len(got) != len(want) {
		return fmt.Errorf("%d tensors, want %d", len(got), len(want))
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

// tooSmall reports whether a call can never run in the memory its model has.
func tooSmall(err error) bool { return errors.Is(err, slab.ErrBudget) }
