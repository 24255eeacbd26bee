package flow

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/chunker"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/terms"
)

func TestWhatIsLentAheadFollowsRateAndRoundTrip(t *testing.T) {
	const ms, mb = terms.Millisecond, int64(1_000_000)
	near := Road{Lanes: 4}
	require.Zero(t, near.Ahead(0, 0))
	require.Zero(t, near.Ahead(terms.Second, 1000*mb), "the round trip is short")

	r := Road{Trip: 50 * ms, Lanes: 2}
	lanes := int64(2 * laneAhead)
	require.Equal(t, lanes, r.Ahead(200*ms, 0))
	require.Equal(t, lanes, r.Ahead(250*ms, 10*mb), "it is looked at every 100 ms")
	require.InDelta(t, lanes+4*5*mb, r.Ahead(300*ms, 10*mb), 1, "100 MB/s, of which 5 MB are on their way")
	require.InDelta(t, lanes+4*5*mb*7/8, r.Ahead(400*ms, 10*mb), 1, "a pause")
	r.Lanes = 200
	require.EqualValues(t, aheadMost, r.Ahead(500*ms, 10*mb))
}

func TestALaneIsLateThatMakesNoProgress(t *testing.T) {
	s, o := new(Sender), &Out{Tensor: one(t, 'a', 4), Chunks: chunker.New(one(t, 'a', 4).Geo)}
	require.NoError(t, o.Chunks.Offer(0, make([]byte, 4), nil))
	o.Desc.RetainChunks, o.Desc.ChunkBytes = 4, 1
	s.Start(o, true, 0)
	s.Laned = true
	const patience = 10
	for i, lane := range []uint8{1, 2, 1, 2} {
		_, _, held := s.Next(terms.Instant(i), new(frame.Chunk), lane)
		held.Release()
	}
	require.Zero(t, s.Late(9, o, patience))
	require.EqualValues(t, 1, s.Late(10, o, patience))
	news, err := s.Acknowledge(9, o, frame.Ack{Below: 1})
	require.NoError(t, err)
	require.True(t, news)
	require.EqualValues(t, 2, s.Late(11, o, patience), "the other lane has made progress")
	s.Lose(o, 2)
	require.True(t, o.Chunks.Again(4))
	require.Zero(t, s.Late(18, o, patience))
	require.EqualValues(t, 1, s.Late(19, o, patience))
	_, err = s.Acknowledge(20, o, frame.Ack{Below: 1, Beyond: []uint32{1, 3}})
	require.Error(t, err, "1 is below 1 and not beyond it")
	news, err = s.Acknowledge(20, o, frame.Ack{Below: 1, Beyond: []uint32{2, 3}})
	require.NoError(t, err)
	require.True(t, news)
	require.Zero(t, s.Late(1000, o, patience), "no lane carries anything")
	o.Desc.RetainChunks = 0
	s.End(o)
}
