package kpu

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/testkit"
)

func TestQuick(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	for _, n := range []int{0, 1, 3, 7500, 262144, 300000, 5 * 262144, 16 * 262144, 40*262144 + 7} {
		x := floats(t, n)
		got, err := f.exchanged(t, chunksOf("a", fileOf(t, x), mib)...)
		require.NoError(t, err)
		require.Len(t, got, 1)
		require.Equal(t, "processed_a", got[0].id)
		same(t, x, got[0].Tensor)
		resp, err := f.uploaded(t, chunksOf("a", fileOf(t, x), mib)...)
		require.NoError(t, err)
		require.Equal(t, "Received 1 tensor(s)", resp.GetMessage())
		same(t, x, f.storedAs(t, "kpu/a"))
	}
}
