package conns

import (
	"context"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/inbound"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/internal/wire"
)

// frames is a *wire.Conn.
type frames interface {
	session.Conn
	Context() context.Context
	Control() int
}

// Frames are the frames of a session, a push or a pull. Those that carry few bytes and open
// nothing are subject to the rate of their connection: a frame costs the same work for one
// byte as for a thousand, and repeated parts must be read, too. That work adds to
// everybody's latency.
type Frames struct {
	frames
	*inbound.RPC // is charged for them
	one          *Conn
	opened       atomic.Int64 // number of tensors

	owed  int   // the last frame's work; belongs to the goroutine that receives, as below
	chunk bool  // it had a chunk
	seen  int64 // of opened, before that frame
	first int64 // opened tensors whose first chunk may still come
}

// Frames returns the frames of a gRPC stream on the connection, which the account of its RPC
// is charged for.
func (c *Conn) Frames(stream grpc.ServerStream, received *inbound.RPC) *Frames {
	return &Frames{frames: wire.NewConn(stream, c.Inbound), RPC: received, one: c}
}

// Send sends a copy of a frame, once there is memory for its payload. The caller hands over
// held.
func (r *Frames) Send(f *frame.Frame, held interface{ Release() }) error {
	if n := f.Chunk.Len(); n > 0 {
		r.one.Inbound.Await(int64(n), r.Context().Done())
	}
	return r.frames.Send(f, held)
}

// Clear reports whether Send would not wait for memory, or for the peer, with a payload of n bytes.
func (r *Frames) Clear(n int) bool { return r.frames.Clear(n) && r.one.Inbound.MayQueue(int64(n)) }

// Opened counts a tensor that the peer has opened.
func (r *Frames) Opened() { r.opened.Add(1) }

// Recv returns the next frame, after the last one's delay has passed or the RPC has ended.
func (r *Frames) Recv() (*frame.Frame, error) {
	opened := r.opened.Load()
	news := opened - r.seen
	r.first = min(r.first+news, firstChunks)
	n := r.owed - openPays*int(news)
	if r.chunk && r.first > 0 { // whether it came with the desc or in a frame of its own
		r.first--
		n -= 1 + placing
	}
	if n > 0 {
		if delay := price(r.one.thin, n); delay > 0 {
			select {
			case <-time.After(delay):
			case <-r.Context().Done(): // which Recv says
			}
		}
	}
	r.owed, r.chunk, r.seen = 0, false, opened
	f, err := r.frames.Recv()
	if err != nil {
		return nil, err
	}
	r.owed = 1 + r.Control()/workBytes - f.Chunk.Len()/payBytes
	if r.chunk = f.HasChunk(); r.chunk {
		r.owed += placing
	}
	return f, nil
}

// price returns how long to wait for n small frames. No frame costs more than the limiter's
// burst.
func price(thin *rate.Limiter, n int) time.Duration {
	if delay := thin.ReserveN(time.Now(), min(n, thin.Burst())).Delay(); delay >= inbound.Debt {
		return delay
	}
	return 0
}
