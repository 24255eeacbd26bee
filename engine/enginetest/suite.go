package enginetest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// Run holds a model to the contract of package engine.
func Run(t *testing.T, c Case) {
	t.Run("refuses what does not fit before taking memory", c.refuses)
	t.Run("results are bit-identical however the input is cut", c.anyCut)
	// The driver holds the blocks to that.
	t.Run("blocks ascend without gaps and end", func(t *testing.T) { c.check(t, c.start(t, memory), c.Inputs, 1<<10, 0) })
	t.Run("an empty tensor is one block of no rows", func(t *testing.T) { c.small(t, c.Empty, 1<<10) })
	t.Run("a scalar is computed", func(t *testing.T) { c.small(t, c.Scalar, 1, 3, 1<<20) })
	t.Run("runs side by side do not disturb each other", func(t *testing.T) { c.sideBySide(t, memory) })
	t.Run("runs that compete for the least memory all finish", c.leastMemory)
	t.Run("a cancelled run ends with the cause in every phase", c.cancelled)
	t.Run("a closed run says so", c.closed)
	t.Run("the steps of a sequence give what one call gives", c.sequence)
}

// start makes the model and checks at the end that nothing is held.
func (c Case) start(t *testing.T, memory int64) engine.Model {
	t.Helper()
	s := c.New(t, memory)
	t.Cleanup(func() { assert.NoError(t, s.Idle()) })
	return s.Model
}

// open opens a run of a model of its own, which is closed at the end at the latest.
func (c Case) open(ctx context.Context, t *testing.T) engine.Run {
	t.Helper()
	m := c.start(t, memory)
	r, err := m.Open(ctx, Call(m, c.Inputs, c.Params, 1<<10))
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := r.Close(); !errors.Is(err, engine.ErrClosed) {
			assert.NoError(t, err, "Close")
		}
	})
	return r
}

func (c Case) check(t *testing.T, m engine.Model, in []tensor.Tensor, chunk int64, seed uint64) {
	t.Helper()
	want, err := c.Want(in)
	require.NoError(t, err)
	if c.Near != 0 {
		uncut, err := Compute(t.Context(), m, in, c.Params, math.MaxInt32, 0)
		if err == nil {
			err = near(uncut, want, c.Near)
		}
		assert.NoError(t, err)
		want = uncut
	}
	got, err := Compute(t.Context(), m, in, c.Params, chunk, seed)
	if err == nil {
		err = Equal(got, want)
	}
	assert.NoError(t, err, "chunks of %d bytes, seed %d", chunk, seed)
}

func (c Case) refuses(t *testing.T) {
	s := c.New(t, memory)
	good := func() engine.Call { return Call(s.Model, c.Inputs, c.Params, 1<<20) }
	extra := engine.Input{Port: "one more", Desc: tensor.Desc{DType: tensor.Int8}, ChunkBytes: 1}
	bad := map[string]func(*engine.Call){
		"one input too many": func(k *engine.Call) { k.Inputs = append(k.Inputs, extra) },
	}
	if len(c.Inputs) > 0 {
		bad["no inputs"] = func(k *engine.Call) { k.Inputs = nil }
		bad["an unknown port"] = func(k *engine.Call) { k.Inputs[0].Port += "?" }
		bad["chunks of no bytes"] = func(k *engine.Call) { k.Inputs[0].ChunkBytes = 0 }
		bad["no data type"] = func(k *engine.Call) { k.Inputs[0].Desc.DType = 0 }
		bad["a negative dimension"] = func(k *engine.Call) { k.Inputs[0].Desc.Shape = tensor.Shape{-1} }
		bad["a size beyond 63 bits"] = func(k *engine.Call) { k.Inputs[0].Desc.Shape = tensor.Shape{1 << 40, 1 << 40} }
	}
	for p, port := range s.Model.Info().Inputs {
		if len(port.DTypes) > 0 && len(port.DTypes) < len(tensor.DataTypes()) {
			bad["a data type that "+port.Name+" does not take"] = func(k *engine.Call) {
				for _, d := range tensor.DataTypes() {
					k.Inputs[p].Desc.DType = d
					if !slices.Contains(port.DTypes, d) {
						return
					}
				}
			}
		}
		if n := len(port.Shape); n > 0 && port.Shape[n-1] >= 0 {
			bad["a last dimension that "+port.Name+" does not take"] = func(k *engine.Call) {
				shape := k.Inputs[p].Desc.Shape.Clone()
				shape[len(shape)-1]++
				k.Inputs[p].Desc.Shape = shape
			}
		}
	}
	for name, spoil := range bad {
		t.Run(name, func(t *testing.T) {
			k := good()
			spoil(&k)
			r, err := s.Model.Open(t.Context(), k)
			assert.Nil(t, r)
			assert.ErrorIs(t, err, engine.ErrInput)
			assert.ErrorAs(t, err, new(*engine.InputError))
			assert.NoError(t, s.Idle())
		})
	}
}

func (c Case) anyCut(t *testing.T) {
	m := c.start(t, memory)
	size, row := int64(1<<16), int64(64) // without inputs: of the chunks that results are kept for
	if len(c.Inputs) > 0 {
		in := c.Inputs[0]
		size = int64(len(in.Data))
		var err error
		_, row, err = in.Rows(m.Info().Axes(len(in.Shape)))
		require.NoError(t, err)
	}
	cuts := []int64{size, size + 1, 1 << 20}
	for _, n := range []int64{1, 2, 5, 64, 100} { // of rows, and straddling them
		cuts = append(cuts, n*row-1, n*row, n*row+1)
	}
	cuts = append(cuts, 7, 1000, 4096, 16383, 16384, 16385)
	for _, chunk := range cuts {
		if chunk < 1 || size/chunk > 1500 {
			continue // a driver that sends more chunks is only slow
		}
		for seed := range uint64(3) {
			c.check(t, m, c.Inputs, chunk, seed)
		}
	}
	assert.Equal(t, m.Info(), m.Info(), "the info changes")
}

// small checks inputs of a few bytes, where there are any.
func (c Case) small(t *testing.T, in []tensor.Tensor, chunks ...int64) {
	if in == nil {
		t.Skip("the model takes no such tensor")
	}
	m := c.start(t, memory)
	for _, chunk := range chunks {
		c.check(t, m, in, chunk, 0)
		c.check(t, m, in, chunk, 1)
	}
}

func (c Case) sideBySide(t *testing.T, memory int64) {
	m := c.start(t, memory)
	var wg sync.WaitGroup
	defer wg.Wait()
	for i := range uint64(6) {
		wg.Go(func() { c.check(t, m, c.Inputs, 1<<12, i) })
	}
}

func (c Case) leastMemory(t *testing.T) {
	memory := int64(256)
	for ; ; memory += memory/8 + 1 {
		require.LessOrEqual(t, memory, int64(1<<32), "no amount of memory is enough")
		s := c.New(t, memory)
		r, err := s.Model.Open(t.Context(), Call(s.Model, c.Inputs, c.Params, 1<<12))
		if err == nil {
			assert.NoError(t, r.Close())
			break
		}
		require.ErrorIs(t, err, slab.ErrBudget) // else the call can never run in so little
		assert.NoError(t, s.Idle())
	}
	c.sideBySide(t, memory)
}

// borrow borrows a block that comes without waiting; nil of a model that has no inputs.
func (c Case) borrow(t *testing.T, r engine.Run) *engine.Block {
	t.Helper()
	b, err := r.Borrow(t.Context())
	if len(c.Inputs) == 0 {
		require.ErrorIs(t, err, io.EOF)
	} else {
		require.NoError(t, err)
	}
	return b
}

// fillOne fills the Whole inputs, if there are any, and the first block of rows.
func fillOne(t *testing.T, c Case, r engine.Run) {
	t.Helper()
	for whole := true; whole && len(c.Inputs) > 0; {
		b := c.borrow(t, r)
		for p, mem := range b.In {
			copy(mem, c.Inputs[p].Data)
		}
		r.Filled(b)
		whole = b.Whole
	}
}

// orEnd checks that an error is the cause of the cancel, or the end: what was done before may
// still be told as it was.
func orEnd(t *testing.T, err, cause error) {
	t.Helper()
	if !errors.Is(err, io.EOF) {
		assert.ErrorIs(t, err, cause)
	}
}

func (c Case) cancelled(t *testing.T) {
	cause := errors.New("the caller went away")
	for phase, name := range []string{"before Borrow", "with a block borrowed", "with a block filled", "with a result held"} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			r := c.open(ctx, t)
			switch phase {
			case 1:
				c.borrow(t, r)
			case 2, 3:
				fillOne(t, c, r)
			}
			if phase == 3 {
				o, err := r.Next(t.Context())
				require.NoError(t, err)
				defer o.Release()
			}
			cancel(cause)
			_, err := r.Borrow(t.Context())
			orEnd(t, err, cause)
			_, err = r.Next(t.Context())
			orEnd(t, err, cause)
		})
	}
	t.Run("before Open", func(t *testing.T) {
		m := c.start(t, memory)
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(cause)
		_, err := m.Open(ctx, Call(m, c.Inputs, c.Params, 1<<10))
		assert.ErrorIs(t, err, cause)
	})
	t.Run("while both sides wait", func(t *testing.T) {
		if len(c.Inputs) == 0 {
			t.Skip("a model without inputs waits for nobody")
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		r := c.open(ctx, t)
		var wg sync.WaitGroup
		wg.Go(func() {
			var err error
			for err == nil {
				_, err = r.Borrow(t.Context())
			}
			orEnd(t, err, cause)
		})
		wg.Go(func() {
			_, err := r.Next(t.Context())
			assert.ErrorIs(t, err, cause)
		})
		cancel(cause)
		wg.Wait()
	})
	t.Run("by the context of a side", func(t *testing.T) {
		r := c.open(t.Context(), t)
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(cause)
		_, err := r.Next(ctx)
		assert.ErrorIs(t, err, cause)
	})
}

func (c Case) closed(t *testing.T) {
	r := c.open(t.Context(), t)
	b := c.borrow(t, r)
	require.NoError(t, r.Close())
	if b != nil {
		r.Filled(b) // came too late, and touches nothing
	}
	_, err := r.Borrow(t.Context())
	assert.ErrorIs(t, err, engine.ErrClosed, "Borrow")
	_, err = r.Next(t.Context())
	assert.ErrorIs(t, err, engine.ErrClosed, "Next")
}

// sequence gives a model that has a state a few rows at a time, which are positions of the first item
// if that has several. Other models refuse a sequence, or its calls are independent.
func (c Case) sequence(t *testing.T) {
	m := c.start(t, memory)
	q, ok := engine.As[engine.Sequencer](m)
	if !ok || m.Info().Rows == 0 || len(c.Inputs) == 0 || len(c.Inputs[0].Shape) < 2 {
		t.Skip("nothing is kept of rows")
	}
	s, err := q.Begin(t.Context(), engine.Sequence{ID: tensor.ID{1}, Params: c.Params, MaxRows: 1 << 20})
	if err != nil || s == nil {
		assert.Nil(t, s)
		assert.True(t, err == nil || errors.Is(err, engine.ErrPrecondition), "%v", err)
		return
	}
	defer s.Close()
	cut := func(axis int, lo, hi int64) (in []tensor.Tensor) {
		for i, x := range c.Inputs {
			if !m.Info().Inputs[i].Whole {
				each := int64(len(x.Data)) / x.Shape[0]
				if x.Shape = x.Shape.Clone(); axis == 1 {
					each /= x.Shape[1]
					x.Shape[0] = 1
				}
				x.Shape[axis], x.Data = hi-lo, x.Data[lo*each:hi*each]
			}
			in = append(in, x)
		}
		return in
	}
	axis, all := 0, c.Inputs[0].Shape[0]
	if n, err := s.Rows(Call(m, cut(0, 0, 1), c.Params, 1)); err == nil && n > 1 {
		axis, all = 1, n
	}
	want, err := engine.Compute(t.Context(), m, c.Params, cut(axis, 0, all)...)
	require.NoError(t, err)
	got := make([][]byte, len(want))
	for lo, n := int64(0), int64(0); lo < all; lo, n = lo+n, n+1 {
		in := cut(axis, lo, min(lo+n, all))
		rows, err := s.Rows(Call(m, in, c.Params, 1<<10))
		require.NoError(t, err)
		assert.Equal(t, in[0].Shape[axis], rows)
		out, err := engine.Step(t.Context(), m, s, in...)
		require.NoError(t, err)
		for i := range out {
			got[i] = append(got[i], out[i].Data...)
		}
	}
	for i := range want {
		assert.True(t, bytes.Equal(want[i].Data, got[i]), "output %d", i)
	}
}
