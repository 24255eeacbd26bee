package bench

import (
	"bytes"
	"encoding/binary"
	"math"
	"net"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestATransferThatLeftAPageStaleHasNoTime(t *testing.T) {
	source, to := make([]byte, 3*ChunkBytes), make([]byte, 3*ChunkBytes)
	FillFloats(source)
	for name, run := range map[string]func() error{
		"one page is stale": func() error {
			copy(to, source[:2*ChunkBytes])
			copy(to[2*ChunkBytes+4096:], source[2*ChunkBytes+4096:])
			return nil
		},
		"the transfer fails": func() error { copy(to, source); return net.ErrClosed },
	} {
		copy(to, source) // what an earlier run left
		s, err := Transfer(Echo, to, source, run)
		require.Error(t, err, name)
		require.Zero(t, s, name)
	}
}

func TestReLUOfTwoFloatsAtATimeIsThatOfEach(t *testing.T) {
	values := []float32{
		1, -1, 0, float32(math.Copysign(0, -1)), float32(math.Inf(1)), float32(math.Inf(-1)),
		math.MaxFloat32, -math.MaxFloat32, math.SmallestNonzeroFloat32, -math.SmallestNonzeroFloat32,
	}
	for _, a := range values {
		for _, b := range values {
			var data [8]byte
			binary.LittleEndian.PutUint32(data[:], math.Float32bits(a))
			binary.LittleEndian.PutUint32(data[4:], math.Float32bits(b))
			Rectify(data[:])
			for i, x := range []float32{a, b} {
				require.Equal(t, math.Float32bits(max(x, 0)), binary.LittleEndian.Uint32(data[4*i:]), "relu of %v in %v, %v", x, a, b)
			}
		}
	}
}

func TestGeneratedFloatsAreNumbersOfBothSigns(t *testing.T) {
	data := make([]byte, 64<<10)
	FillFloats(data)
	signs := map[bool]int{}
	for ; len(data) > 0; data = data[4:] {
		x := math.Float32frombits(binary.LittleEndian.Uint32(data))
		a := math.Abs(float64(x))
		require.True(t, a >= 0.5 && a < 1, "%v", x)
		signs[x < 0]++
	}
	require.Greater(t, signs[true], 7000)
	require.Greater(t, signs[false], 7000)
}

func TestCheckFindsEveryByteThatDiffers(t *testing.T) {
	source := make([]byte, 2*ChunkBytes+8)
	FillFloats(source)
	for _, op := range Moves {
		made := bytes.Clone(source)
		if op == ReLU {
			Rectify(made)
		}
		require.NoError(t, Check(op, made, source))
		for _, i := range []int{0, ChunkBytes - 1, ChunkBytes, len(made) - 1} {
			made[i] ^= 1
			require.Error(t, Check(op, made, source), "%s: byte %d differs", op, i)
			made[i] ^= 1
		}
		Spoil(made, source)
		require.Error(t, Check(op, made, source), "%s: all pages are spoiled", op)
	}
}
