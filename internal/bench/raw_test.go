package bench

import (
	"bytes"
	"encoding/binary"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

func TestRawRefusesAPieceWhoseChecksumFails(t *testing.T) {
	testkit.Start(t)
	for _, sum := range []codec.Checksum{codec.CRC32C, codec.CRC32} {
		a, b := net.Pipe()
		piece := []byte("a piece")
		go func() { // ends when Receive has read it
			_, _ = a.Write(append(binary.LittleEndian.AppendUint32(nil, sum.Update(0, piece)^1), piece...))
		}()
		err := NewRawLink(b, sum).Receive(make([]byte, len(piece)))
		require.ErrorContains(t, err, "checksum")
	}
}

func TestAPartOutsideTheMemoryIsRefused(t *testing.T) {
	mem := make([]byte, 64)
	for _, tc := range []struct {
		from, n int64
		good    bool
	}{{0, 64, true}, {56, 8, true}, {57, 8, false}, {0, 65, false}, {-8, 8, false}, {0, 7, false}, {1<<63 - 1, 8, false}} {
		var b bytes.Buffer
		require.NoError(t, binary.Write(&b, binary.LittleEndian, opening{[8]byte{'r', 'e', 'l', 'u'}, tc.from, tc.n}))
		op, part, err := heard(&b, mem)
		require.Equal(t, tc.good, err == nil, "%+v", tc)
		if tc.good {
			require.Equal(t, ReLU, op)
			require.Len(t, part, int(tc.n))
		}
	}
}
