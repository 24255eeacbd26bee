package flow

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/assembler"
	"github.com/tensorferry/tensorferry/chunker"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

// one returns a tensor of n chunks of a byte.
func one(t *testing.T, id byte, n int64) Tensor {
	geo, err := tensor.NewGeometry(n, 1)
	require.NoError(t, err)
	return Tensor{Desc: frame.Desc{Tensor: tensor.ID{id}}, Geo: geo}
}

func TestSmallTensorsPrecedeLargeOnesThatStillGetATurn(t *testing.T) {
	var s Sender
	send := func(id byte, n int64, allowance int64) *Out {
		o := &Out{Tensor: one(t, id, n), Chunks: chunker.New(one(t, id, n).Geo)}
		require.NoError(t, o.Chunks.Offer(0, make([]byte, n), nil))
		s.Start(o, false, allowance)
		return o
	}
	took := func(n int, lane uint8) (ids []byte) {
		for range n {
			o, again, held := s.Next(0, new(frame.Chunk), lane)
			require.NotNil(t, o)
			require.False(t, again)
			held.Release()
			ids = append(ids, o.Desc.Tensor[0])
		}
		return ids
	}
	a, b := send('a', 4, 0), send('b', 4, 0)
	require.False(t, s.Ready(false), "without credit")
	require.True(t, s.Credit(a, 9))
	require.True(t, s.Credit(b, 3))
	require.False(t, s.Credit(b, 3), "no news")
	require.Equal(t, "abab", string(took(4, 0)))

	c := send('c', smallRun+3, 1<<10)
	require.True(t, c.Desc.OnAllowance)
	require.EqualValues(t, smallRun+3, s.Allowance)
	require.Equal(t, "cccccccca", string(took(smallRun+1, 0)))
	s.Laned = true
	require.Equal(t, "ba", string(took(2, 3)))
	require.Len(t, a.laned, 1)
	require.Equal(t, "ccc", string(took(3, 0)))
	require.False(t, s.Ready(false))
	require.False(t, s.Ready(true), "b has no credit for its last chunk")

	s.Laned = false
	s.Lose(b, 2)
	require.False(t, b.Chunks.Again(3), "another lane carries it")
	s.Lose(b, 3)
	require.True(t, b.Chunks.Again(3))
	_, again, held := s.Next(0, new(frame.Chunk), 0)
	require.True(t, again, "it is not acknowledged")
	held.Release()
	for _, o := range []*Out{a, b, c} {
		s.End(o)
	}
	require.Zero(t, s.Allowance)
	o, _, _ := s.Next(0, new(frame.Chunk), 0)
	require.Nil(t, o, "what has ended sends nothing")
}

type owner bool

func (o owner) OwesAck(bool, *frame.Desc) bool { return bool(o) }

func TestAnAcknowledgementWaitsForAFrameUnlessTheSenderNeedsIt(t *testing.T) {
	for name, tc := range map[string]struct {
		retain uint32
		ends   bool
		owed   owner
		urgent bool
		acks   int
	}{
		"the sender retains all of it":          {acks: 1},
		"the sender retains one chunk":          {retain: 1, urgent: true, acks: 1},
		"it has ended, and its call says so":    {ends: true},
		"it has ended, and its call goes on":    {ends: true, owed: true, acks: 1},
		"it has ended, and its sender is short": {retain: 1, ends: true, owed: true, urgent: true, acks: 1},
	} {
		t.Run(name, func(t *testing.T) {
			r := Receiver{Terms: new(terms.Config)}
			r.Terms.SetDefaults()
			in := &In{Tensor: one(t, 'a', 2), Owner: tc.owed}
			in.Desc.RetainChunks = tc.retain
			in.Asm = assembler.New(in.Desc.Tensor, in.Geo, codec.CRC32C, func(func(bool), bool) {})
			r.Start(in)
			in.Asm.Hold(1)
			in.Asm.Lend(make([]byte, 1), nil)
			r.WantCredit(0, in)
			require.True(t, r.DueNow(), "the peer has used all of its credit")
			var f frame.Frame
			r.Add(&Parcel{Frame: &f})
			require.Equal(t, []frame.Credit{{Tensor: in.Desc.Tensor, Limit: 2}}, f.Credits)

			place(t, in, 1)
			r.Arrived(0, in)
			require.Equal(t, tc.urgent, r.DueNow())
			if tc.ends {
				r.End(in)
				require.Zero(t, r.Open)
			}
			f.Reset()
			r.Add(&Parcel{Frame: &f})
			require.Len(t, f.Acks, tc.acks)
			require.Zero(t, r.Open, "what is whole and acknowledged is not open")
			_, acks := r.Due()
			require.Zero(t, acks)
		})
	}
}

// place puts a chunk of one byte in its place.
func place(t *testing.T, in *In, index uint32) {
	var c assembler.Claim
	sum := codec.CRC32C.Update(codec.CRC32C.Seed(in.Desc.Tensor, index), []byte{7})
	_, err := in.Asm.Claim(&c, index, 1, codec.None, sum)
	require.NoError(t, err)
	got, err := c.Copy([][]byte{{7}})
	require.NoError(t, err)
	ok, err := in.Asm.Commit(&c, got, nil)
	require.NoError(t, err)
	require.True(t, ok)
}
