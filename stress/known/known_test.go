package known

import (
	"io"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWindowsLieInTheirMemoryAndDiffer(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 1000 {
		n := Size(r, LargestBytes)
		a, b := Pick(r.Uint64(), n), Pick(r.Uint64(), n)
		require.Zero(t, a.at%4)
		require.Len(t, a.Data(), n)
		require.Len(t, a.ReLU(), n)
		size, err := a.Desc().Bytes()
		require.NoError(t, err)
		require.EqualValues(t, n, size)
		if n >= 64 && a != b {
			var wrong *WrongError
			require.ErrorAs(t, Same("x", a.Data(), b.Data()), &wrong)
		}
	}
	require.NoError(t, Same("x", nil, []byte{}))
	require.ErrorContains(t, Same("x", []byte{1, 2}, []byte{1, 3}), "byte 1 of 2")
	require.ErrorContains(t, Same("x", []byte{1}, []byte{1, 3}), "1 bytes, not 2")
}

func TestAHeldReaderGivesItsSecondHalfWhenLetGo(t *testing.T) {
	let := make(chan struct{})
	h := Held([]byte("abcdefgh"), let)
	half := make([]byte, 8)
	n, err := h.Read(half)
	require.NoError(t, err)
	require.Equal(t, "abcd", string(half[:n]))
	close(let)
	rest, err := io.ReadAll(h)
	require.NoError(t, err)
	require.Equal(t, "efgh", string(rest))
}
