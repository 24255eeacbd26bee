package server

import (
	"context"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/inbound"
	"github.com/tensorferry/tensorferry/internal/session"
)

const (
	// The work of a frame is counted in small frames: one for itself, placing more for a
	// chunk, and one for each workBytes of its control parts. Each payBytes of payload pays
	// for one, so that chunks of 3 KiB and more are free. Each call or tensor that the
	// frame opens pays for openPays, that is, for 16 KiB of control parts: these have
	// limits of their own.
	placing   = 2
	workBytes = 256
	payBytes  = 1 << 10
	openPays  = 64
	// thinDebt is how far a connection may exceed its rate before it waits: a timer for
	// each frame would cost more than the frame.
	thinDebt = 5 * time.Millisecond
)

// frames is a *wire.Conn.
type frames interface {
	session.Conn
	Context() context.Context
	Control() int
	Excuse()
}

// rateLimit limits the frames of a session or a push. Frames that carry few bytes and open
// nothing are subject to the rate of their connection: a frame costs the same work for one
// byte as for a thousand, and repeated parts must be read, too. That work adds to
// everybody's latency.
type rateLimit struct {
	frames
	thin     *rate.Limiter // the connection's limit
	opened   atomic.Int64  // number of tensors
	received *inbound.RPC

	owed int   // the last frame's work; belongs to the goroutine that receives, as below
	seen int64 // of opened, before that frame
}

// Holds charges the bytes that are kept of what the peer has sent.
func (r *rateLimit) Holds(bytes int64) { r.received.Holds(bytes) }

// Take is like Holds, but fails if there is no memory for the bytes.
func (r *rateLimit) Take(bytes int64) bool { return r.received.Take(bytes) }

// Opened counts a tensor that the peer has opened.
func (r *rateLimit) Opened() { r.opened.Add(1) }

// Recv returns the next frame, after the last one's delay has passed or the RPC has ended.
func (r *rateLimit) Recv() (*frame.Frame, error) {
	opened := r.opened.Load()
	if n := r.owed - openPays*int(opened-r.seen); n > 0 {
		r.wait(n)
	}
	r.owed, r.seen = 0, opened
	f, err := r.frames.Recv()
	if err != nil {
		return nil, err
	}
	r.owed = 1 + r.Control()/workBytes - f.Chunk.Len()/payBytes
	if f.HasChunk() {
		r.owed += placing
	}
	return f, nil
}

// wait waits for the delay of n small frames.
func (r *rateLimit) wait(n int) {
	delay := price(r.thin, n)
	if delay == 0 {
		return
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-r.Context().Done(): // the next Recv returns the error
	}
}

// price returns how long to wait for n small frames. No frame costs more than the limiter's
// burst.
func price(thin *rate.Limiter, n int) time.Duration {
	if delay := thin.ReserveN(time.Now(), min(n, thin.Burst())).Delay(); delay >= thinDebt {
		return delay
	}
	return 0
}
