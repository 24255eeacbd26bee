package server

import (
	"context"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"

	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// source is a peer whose frames are there at once.
type source struct {
	grpc.ServerStream
	ctx   context.Context
	frame stream.Frame
	err   error
}

func (s *source) Context() context.Context { return s.ctx }

func (s *source) RecvMsg(m any) error {
	m.(*wire.Message).Frame = s.frame
	return s.err
}

// TestThinFramesComeAtThePaceOfTheirConnection needs a clock of its own: over a
// socket only the time of the day would tell.
func TestThinFramesComeAtThePaceOfTheirConnection(t *testing.T) {
	testkit.Start(t)
	const perSecond = 1000
	chunk := func(n int) stream.Frame {
		return stream.Frame{Chunk: stream.Chunk{Tensor: tensor.ID{1}, Data: [][]byte{make([]byte, n)}}}
	}
	opens := chunk(1)
	opens.Descs = make([]stream.Desc, 1)
	calls := chunk(1)
	calls.Calls = make([]stream.Call, 1)
	for name, c := range map[string]struct {
		frame stream.Frame
		err   error
		paced bool
	}{
		"a chunk of a byte":             {frame: chunk(1), paced: true},
		"nothing at all":                {paced: true},
		"acknowledgements":              {frame: stream.Frame{Acks: make([]stream.Ack, 1)}, paced: true},
		"the largest that is thin":      {frame: chunk(thinBytes - 1), paced: true},
		"the smallest that is not":      {frame: chunk(thinBytes)},
		"a small tensor with its desc":  {frame: opens},
		"a small call":                  {frame: calls},
		"the end of the peer's sending": {err: io.EOF},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				book := connections{thin: perSecond}
				one := book.one()
				began := time.Now()
				// Two streams of one connection share its pace; a third is another's.
				mine := []paced{
					{&source{ctx: t.Context(), frame: c.frame, err: c.err}, one.thin},
					{&source{ctx: t.Context(), frame: c.frame, err: c.err}, one.thin},
				}
				var msg wire.Message
				for i := range perSecond / 10 { // what may come at once
					require.Equal(t, c.err, mine[i%2].RecvMsg(&msg))
				}
				require.Zero(t, time.Since(began))
				for i := range 10 * perSecond {
					require.Equal(t, c.err, mine[i%2].RecvMsg(&msg))
				}
				if took := time.Since(began); c.paced {
					require.InDelta(t, 10*time.Second, took, float64(2*thinDebt))
				} else {
					require.Zero(t, took)
				}
				began = time.Now()
				other := paced{&source{ctx: t.Context(), frame: c.frame, err: c.err}, book.one().thin}
				require.Equal(t, c.err, other.RecvMsg(&msg))
				require.Zero(t, time.Since(began))
			})
		})
	}
}

func TestTheEndOfAnRPCEndsItsWaitForThePace(t *testing.T) {
	testkit.Start(t)
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		p := paced{&source{ctx: ctx}, rate.NewLimiter(rate.Every(time.Hour), 1)}
		began := time.Now()
		var msg wire.Message
		require.NoError(t, p.RecvMsg(&msg))
		require.Zero(t, time.Since(began))
		require.NoError(t, p.RecvMsg(&msg))
		require.Equal(t, time.Second, time.Since(began))
	})
}
