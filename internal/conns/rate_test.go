package conns

import (
	"context"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/inbound"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// source is a peer whose frames are there at once.
type source struct {
	frames
	ctx     context.Context
	payload int
	control int
	err     error

	data []byte // the payload, made once
}

func (s *source) Context() context.Context { return s.ctx }

func (s *source) Control() int { return s.control }

func (s *source) Recv() (*frame.Frame, error) {
	f := &frame.Frame{}
	if s.payload > 0 {
		if s.data == nil {
			s.data = make([]byte, s.payload)
		}
		f.Chunk = frame.Chunk{Tensor: tensor.ID{1}, Data: [][]byte{s.data}}
	}
	return f, s.err
}

// TestTheFirstChunkOfEachTensorIsFree has descs come together in one frame, and their small
// chunks in frames of their own.
func TestTheFirstChunkOfEachTensorIsFree(t *testing.T) {
	testkit.Start(t)
	synctest.Test(t, func(t *testing.T) {
		one := &Conn{thin: New(Config{ThinFrames: 1000}).limiter()}
		chunks := &source{ctx: t.Context(), payload: 1, control: 60}
		r := &Frames{frames: &source{ctx: t.Context(), control: 60}, one: one}
		recv := func(n int) time.Duration {
			began := time.Now()
			for range n {
				_, err := r.Recv()
				require.NoError(t, err)
			}
			return time.Since(began)
		}
		for range 100 {
			r.frames = &source{ctx: t.Context(), control: 60}
			recv(1)
			r.opened.Add(64)
			r.frames = chunks
			require.Zero(t, recv(64))
		}
		require.Greater(t, recv(1001), time.Second, "further chunks come at the rate")
		r.opened.Add(1 << 20)
		require.Greater(t, recv(firstChunks+1000), time.Second, "tensors that were opened long ago pay for few")
	})
}

// TestThinFramesComeAtTheRateOfTheirConnection needs a clock of its own: over a
// socket only the time of the day would tell.
func TestThinFramesComeAtTheRateOfTheirConnection(t *testing.T) {
	testkit.Start(t)
	const perSecond = 1000
	for name, c := range map[string]struct {
		source
		opens int64 // of each frame
		costs int   // thin frames
	}{
		"a chunk of a byte":                      {source{payload: 1, control: 60}, 0, 3},
		"nothing at all":                         {source{}, 0, 1},
		"the largest that is thin":               {source{payload: 3*payBytes - 1, control: workBytes - 1}, 0, 1},
		"the smallest that is not":               {source{payload: 3 * payBytes, control: workBytes - 1}, 0, 0},
		"a chunk":                                {source{payload: 1 << 20, control: 60}, 0, 0},
		"as many control parts as a frame holds": {source{control: 64 << 10}, 0, 257},
		"the same beside a little payload":       {source{payload: 56 << 10, control: 64 << 10}, 0, 203},
		"a small call":                           {source{payload: 1, control: 160}, 2, 0},
		"a call of long names":                   {source{control: 30 << 10}, 2, 0},
		"one call beside what is repeated":       {source{control: 64 << 10}, 1, 193},
		"the end of the peer's sending":          {source{err: io.EOF}, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c.ctx = t.Context()
				all := New(Config{ThinFrames: perSecond})
				one := &Conn{thin: all.limiter()}
				began := time.Now()
				// Two streams of one connection share its rate; a third is another's.
				mine := []*Frames{{frames: &c.source, one: one}, {frames: &c.source, one: one}}
				next := func(r *Frames) {
					_, err := r.Recv()
					require.Equal(t, c.err, err)
					r.opened.Add(c.opens)
				}
				cost := min(c.costs, perSecond/10)             // no frame costs more
				for i := range perSecond / 10 / max(cost, 1) { // what may come at once
					next(mine[i%2])
				}
				require.Zero(t, time.Since(began))
				for i := range 10 * perSecond {
					next(mine[i%2])
				}
				require.InDelta(t, time.Duration(10*cost)*time.Second, time.Since(began), float64(3*inbound.Debt+time.Duration(cost)*3*time.Millisecond))
				began = time.Now()
				next(&Frames{frames: &c.source, one: &Conn{thin: all.limiter()}})
				require.Zero(t, time.Since(began))
			})
		})
	}
}

func TestTheEndOfAnRPCEndsItsWaitForTheRateLimit(t *testing.T) {
	testkit.Start(t)
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		r := Frames{frames: &source{ctx: ctx}, one: &Conn{thin: rate.NewLimiter(rate.Every(time.Hour), 1)}}
		began := time.Now()
		next := func() {
			_, err := r.Recv()
			require.NoError(t, err)
		}
		for range 2 {
			next()
			require.Zero(t, time.Since(began))
		}
		next()
		require.Equal(t, time.Second, time.Since(began))
	})
}
