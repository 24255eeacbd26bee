package bench

import (
	"encoding/binary"
	"errors"
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

func TestNoTwoMovesBeginAlike(t *testing.T) {
	for _, op := range Moves {
		a, b := net.Pipe()
		go func() { _ = NewRawLink(a, 0).Tell(op, true) }() // ends when it is heard
		got, err := NewRawLink(b, 0).Hear()
		require.NoError(t, err)
		require.Equal(t, op, got)
		go func() { _, _ = a.Write([]byte{0}) }()
		_, err = NewRawLink(b, 0).Hear()
		require.Error(t, err)
		require.NoError(t, errors.Join(a.Close(), b.Close()))
	}
}
