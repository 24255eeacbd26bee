package worker

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/enginetest"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// compute runs one call of a row, as whoever serves does.
func compute(b *testing.B, m engine.Model, c engine.Call, row []byte) {
	r, err := m.Open(b.Context(), c)
	require.NoError(b, err)
	block, err := r.Borrow(b.Context())
	require.NoError(b, err)
	copy(block.In[0], row)
	r.Filled(block)
	out, err := r.Next(b.Context())
	require.NoError(b, err)
	out.Release()
	require.NoError(b, r.Close())
}

// BenchmarkRow measures calls of a row of 8 KiB whose model returns it, and such steps of a sequence: from Open to Close.
func BenchmarkRow(b *testing.B) {
	c := python(b, "echo")
	c.Log = nil
	h := start(b, c)
	x, err := tensor.Of(testkit.Bytes(8<<10, 7), 1, 8<<10)
	require.NoError(b, err)
	call := enginetest.Call(h.Model(), []tensor.Tensor{x}, nil, 1<<20)
	step := call
	step.State, err = h.begin(b.Context(), engine.Sequence{MaxRows: 1 << 40})
	require.NoError(b, err)
	for name, call := range map[string]engine.Call{"call": call, "step": step} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				compute(b, h.Model(), call, x.Data)
			}
		})
	}
}
