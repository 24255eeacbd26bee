package wire

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// The memory of a frame that was fat is not kept for the next.
func TestAMessageThatWasFatGivesItsMemoryBack(t *testing.T) {
	testkit.Start(t)
	var f frame.Frame
	for i := range MaxParts {
		f.Acks = append(f.Acks, frame.Ack{Tensor: tensorA, Resend: []uint32{uint32(i)}})
		f.Descs = append(f.Descs, frame.Desc{Tensor: tensorA})
	}
	f.Chunk = frame.Chunk{Tensor: tensorA, Data: [][]byte{make([]byte, 4000)}}
	b := encode(t, &f)
	l := &ledger{t: t}
	data := l.split(b, 1)
	m := new(Message)
	require.NoError(t, Codec{}.Unmarshal(data, m))
	data.Free()
	require.NoError(t, m.Err)
	require.Len(t, m.Frame.Chunk.Data, 4000)
	m.Free()
	m.Control = 0
	require.Equal(t, new(Message), m, "nothing is kept")
	require.Equal(t, l.made, l.in)
}

func TestAShapeOfTooManyAxesIsCutWhereThatIsSeen(t *testing.T) {
	testkit.Start(t)
	for rank, kept := range map[int]int{0: 0, tensor.MaxRank: tensor.MaxRank, tensor.MaxRank + 1: tensor.MaxRank + 1, 60_000: tensor.MaxRank + 1} {
		f := frame.Frame{Descs: []frame.Desc{{Tensor: tensorA, Desc: tensor.Desc{Shape: make(tensor.Shape, rank)}}}}
		d := decode(t, encode(t, &f))
		require.NoError(t, d.err)
		got := d.frame.Descs[0].Shape
		require.Len(t, got, kept)
		require.LessOrEqual(t, cap(got), 2*tensor.MaxRank)
		require.Equal(t, rank > tensor.MaxRank, got.Validate() != nil)
	}
}
