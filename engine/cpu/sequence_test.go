package cpu

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/enginetest"
	"github.com/tensorferry/tensorferry/engine/stack"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// decoder is a transformer of blocks of that width, all causal, behind first.
func decoder(heads, blocks int, first ...stack.Layer) stack.Spec {
	s := stack.Spec{Format: 2, Name: "decoder", Version: "1", Layers: first}
	for range blocks {
		s.Layers = append(s.Layers,
			stack.Layer{Kind: "residual", Op: "start"},
			stack.Layer{Kind: "layernorm"},
			stack.Layer{Kind: "attention", Heads: heads, Weight: "in", Bias: "in.bias", OutWeight: "out", OutBias: "out.bias", Causal: true},
			stack.Layer{Kind: "residual", Op: "add"},
			stack.Layer{Kind: "residual", Op: "start"},
			stack.Layer{Kind: "rmsnorm"},
			stack.Layer{Kind: "linear", Weight: "up"},
			stack.Layer{Kind: "gelu"},
			stack.Layer{Kind: "linear", Weight: "down"},
			stack.Layer{Kind: "residual", Op: "add"},
		)
	}
	return s
}

func decoderWeights(d tensor.DataType, width int64) map[string]tensor.Tensor {
	w := map[string]tensor.Tensor{
		"tokens": floatTensor(1, 50, width), "places": floatTensor(2, 700, width),
		"in": floatTensor(3, 3*width, width), "in.bias": floatTensor(4, 3*width), "out": floatTensor(5, width, width), "out.bias": floatTensor(6, width),
		"up": floatTensor(7, 4*width, width), "down": floatTensor(8, width, 4*width),
	}
	for name, t := range w {
		w[name] = as(d, t)
	}
	return w
}

var places = stack.Layer{Kind: "positions", Weight: "places"}

// begin begins a sequence of at most so many rows, which the test closes.
func begin(t testing.TB, m engine.Model, rows int64) engine.State {
	t.Helper()
	q, ok := engine.As[engine.Sequencer](m)
	require.True(t, ok)
	s, err := q.Begin(t.Context(), engine.Sequence{ID: tensor.ID{1}, MaxRows: rows})
	require.NoError(t, err)
	require.NotNil(t, s)
	return s
}

// part is the positions from lo to hi of a tensor of one item.
func part(x tensor.Tensor, lo, hi int64) tensor.Tensor {
	each := int64(len(x.Data)) / x.Shape[1]
	return tensor.Tensor{Desc: tensor.Desc{DType: x.DType, Shape: append(tensor.Shape{1, hi - lo}, x.Shape[2:]...)}, Data: x.Data[lo*each : hi*each]}
}

// inSteps computes x in a sequence of its own: steps are the positions of each call, and the last is repeated.
func inSteps(t testing.TB, m engine.Model, x tensor.Tensor, steps ...int64) (y []byte) {
	t.Helper()
	s := begin(t, m, x.Shape[1])
	defer s.Close()
	for at, i := int64(0), 0; at < x.Shape[1]; i++ {
		n := min(steps[min(i, len(steps)-1)], x.Shape[1]-at)
		got, err := engine.Step(t.Context(), m, s, part(x, at, at+n))
		require.NoError(t, err)
		require.Equal(t, n, got[0].Shape[1])
		y = append(y, got[0].Data...)
		at += n
	}
	return y
}

func TestStepsGiveWhatOneCallGives(t *testing.T) {
	h := newHost(64 << 20)
	defer h.Close()
	cuts := [][]int64{{1}, {70, 1}, {1, 63, 1, 64}, {63, 2}, {64, 1, 64}, {65, 64}, {191, 1, 1}, {7}, {130, 0, 70}}
	const n = 200
	for _, c := range []struct {
		dtype                tensor.DataType
		width, heads, blocks int
	}{
		{tensor.Float32, 1, 1, 1}, {tensor.Float32, 15, 3, 2}, {tensor.Float32, 200, 1, 1}, {tensor.Float32, 32, 4, 3}, {tensor.Float16, 16, 2, 2},
	} {
		x := as(c.dtype, floatTensor(9, 1, n, int64(c.width)))
		for name, m := range map[string]struct {
			first []stack.Layer
			x     tensor.Tensor
		}{
			"rows":      {nil, x},
			"positions": {[]stack.Layer{places}, x},
			"ids":       {[]stack.Layer{embed, places}, ids(tensor.Int32, 50, 1, n)},
		} {
			t.Run(fmt.Sprintf("%v %s", c, name), func(t *testing.T) {
				made, err := newStack(h, decoder(c.heads, c.blocks, m.first...), decoderWeights(c.dtype, int64(c.width)))
				require.NoError(t, err)
				want, err := engine.Compute(t.Context(), made, nil, m.x)
				require.NoError(t, err)
				for _, steps := range cuts {
					require.True(t, bytes.Equal(want[0].Data, inSteps(t, made, m.x, steps...)), "%v", steps)
				}
				few, err := engine.Compute(t.Context(), made, nil, part(m.x, 0, 60)) // in a tile that steps have used
				require.NoError(t, err)
				require.True(t, bytes.HasPrefix(want[0].Data, few[0].Data))
			})
		}
	}
	idle(t, h)
}

func TestASequenceWithoutAttentionKeepsOnlyItsPosition(t *testing.T) {
	h := newHost(64 << 20)
	defer h.Close()
	m, err := newStack(h, decoder(1, 0, embed, places), decoderWeights(tensor.Float32, 15))
	require.NoError(t, err)
	x := ids(tensor.Int64, 50, 1, 70)
	want, err := engine.Compute(t.Context(), m, nil, x)
	require.NoError(t, err)
	require.True(t, bytes.Equal(want[0].Data, inSteps(t, m, x, 65, 1)))
	s := begin(t, m, 70)
	require.Zero(t, s.Bytes())
	idle(t, h)
	s.Close()

	rows, err := newStack(h, everything, weights())
	require.NoError(t, err)
	q, ok := engine.As[engine.Sequencer](rows)
	require.True(t, ok)
	s, err = q.Begin(t.Context(), engine.Sequence{MaxRows: 9})
	require.NoError(t, err)
	require.Nil(t, s, "the calls are independent")
}

func TestWhatCannotBeComputedInStepsIsRefused(t *testing.T) {
	h := newHost(64 << 20)
	defer h.Close()
	masked := decoder(3, 1, places)
	masked.Mask = true
	ahead := decoder(3, 2, places)
	ahead.Layers[13].Causal = false
	for text, s := range map[string]stack.Spec{
		`model "decoder" has an input "mask"`:              masked,
		`model "decoder" has attention that is not causal`: ahead,
	} {
		w := decoderWeights(tensor.Float32, 15)
		maps.Copy(w, weights())
		w["a.weight"] = floatTensor(1, 200, 15)
		m, err := newStack(h, s, w)
		require.NoError(t, err)
		q, ok := engine.As[engine.Sequencer](m)
		require.True(t, ok)
		s, err := q.Begin(t.Context(), engine.Sequence{MaxRows: 9})
		require.Nil(t, s)
		require.ErrorIs(t, err, engine.ErrPrecondition)
		require.ErrorContains(t, err, text)
	}
	idle(t, h)
}

func TestTheRowsOfASequenceAreThePositionsOfOneItem(t *testing.T) {
	h := newHost(64 << 20)
	defer h.Close()
	w := decoderWeights(tensor.Float32, 15)
	w["places"] = floatTensor(2, 100, 15)
	m, err := newStack(h, decoder(3, 1, places), w)
	require.NoError(t, err)
	s, short := begin(t, m, 1000), begin(t, m, 80)
	defer s.Close()
	defer short.Close()
	x := floatTensor(9, 1, 200, 15)
	for _, s := range []engine.State{s, short} {
		_, err = engine.Step(t.Context(), m, s, part(x, 0, 60))
		require.NoError(t, err)
	}
	for _, c := range []struct {
		in    tensor.Tensor
		fails string
	}{
		{part(x, 0, 0), ""},
		{part(x, 0, 40), ""},
		{part(x, 0, 41), "wanted at most 100 positions in a sequence, which has 60, got 41 more"},
		{part(x, 0, 101), "wanted at most 100 positions, got 101"},
		{floatTensor(9, 2, 5, 15), "wanted 1 item, whose positions are the rows of the sequence, got float32[2 5 15]"},
		{floatTensor(9, 1, 5, 14), "shape [any any 15]"},
	} {
		rows, err := s.Rows(enginetest.Call(m, []tensor.Tensor{c.in}, nil, 64))
		if c.fails == "" {
			require.NoError(t, err)
			require.Equal(t, c.in.Shape[1], rows)
			continue
		}
		require.ErrorAs(t, err, new(*engine.InputError))
		require.ErrorContains(t, err, c.fails)
		_, err = engine.Step(t.Context(), m, s, c.in)
		require.ErrorContains(t, err, c.fails)
	}
	_, err = engine.Step(t.Context(), m, short, part(x, 0, 21))
	require.ErrorAs(t, err, new(*engine.InputError))
	require.ErrorContains(t, err, "wanted at most 80 rows in a sequence, as it began, which has 60, got 21 more")
	for _, s := range []engine.State{s, short} { // what was refused was not computed
		_, err = engine.Step(t.Context(), m, s, part(x, 0, 20))
		require.NoError(t, err)
	}
}

func TestTheMemoryOfASequenceIsChargedUntilItIsClosed(t *testing.T) {
	const rows = 700 // that places has
	each := int64(2 * 2 * 15 * rows * 4)
	h := newHost(2*each + 4<<20)
	defer h.Close()
	m, err := newStack(h, decoder(3, 2, places), decoderWeights(tensor.Float32, 15))
	require.NoError(t, err)
	s := begin(t, m, 1<<40)
	require.Equal(t, each, s.Bytes())
	used, _, _ := h.Budget().Used()
	require.Equal(t, each, used)
	few := begin(t, m, 7)
	require.Equal(t, each/100, few.Bytes())
	few.Close()

	// Its memory is given up while a call is open, and while that is computed.
	x := floatTensor(9, 1, rows, 15)
	ctx, cancel := context.WithCancel(t.Context())
	r, err := m.Open(t.Context(), engine.Call{State: s, Inputs: enginetest.Call(m, []tensor.Tensor{x}, nil, 1<<20).Inputs})
	require.NoError(t, err)
	b, err := r.Borrow(ctx)
	require.NoError(t, err)
	copy(b.In[0], x.Data)
	r.Filled(b)
	before, _, _ := h.Budget().Used()
	s.Close()
	s.Close()
	after, _, _ := h.Budget().Used()
	require.LessOrEqual(t, after, before-each)
	want, err := engine.Compute(t.Context(), m, nil, x)
	require.NoError(t, err)
	require.True(t, bytes.Equal(want[0].Data, inSteps(t, m, x, 650, 10)), "beside the one that is still computed")
	cancel()
	require.NoError(t, r.Close())
	idle(t, h)

	// Half of the host's memory is for calls.
	small := newHost(2*each - 2)
	defer small.Close()
	m, err = newStack(small, decoder(3, 2, places), decoderWeights(tensor.Float32, 15))
	require.NoError(t, err)
	q, _ := engine.As[engine.Sequencer](m)
	_, err = q.Begin(t.Context(), engine.Sequence{MaxRows: rows})
	require.ErrorIs(t, err, slab.ErrBudget)
	most := begin(t, m, rows-1)
	ctx, cancel = context.WithCancel(t.Context())
	cancel()
	_, err = q.Begin(ctx, engine.Sequence{MaxRows: rows - 1})
	require.ErrorIs(t, err, context.Canceled)
	most.Close()
	idle(t, small)
	begin(t, m, rows-1).Close()
}

func TestAStepIsChargedForScoresOfManyKeys(t *testing.T) {
	h := newHost(64 << 20)
	defer h.Close()
	m, err := newStack(h, decoder(3, 1, places), decoderWeights(tensor.Float32, 15))
	require.NoError(t, err)
	s := begin(t, m, 700)
	defer s.Close()
	x := floatTensor(9, 1, 700, 15)
	_, err = engine.Step(t.Context(), m, s, part(x, 0, 600))
	require.NoError(t, err)
	charged := func(n int64) int64 {
		before, _, _ := h.Budget().Used()
		r, err := m.Open(t.Context(), engine.Call{State: s, Inputs: enginetest.Call(m, []tensor.Tensor{part(x, 0, n)}, nil, 64).Inputs})
		require.NoError(t, err)
		after, _, _ := h.Budget().Used()
		require.NoError(t, r.Close())
		return after - before
	}
	require.Less(t, charged(6), int64(4*tileRows*tileRows), "scores of 6 × 606 keys have place in any tile")
	require.GreaterOrEqual(t, charged(40), int64(4*40*640))
}
