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
	// A frame's work is counted in thin frames: one for itself, placing more for a
	// chunk, and one for each workBytes of its control parts. Each payBytes of payload
	// pays for one, so that chunks from 3 KiB on are free, and each call or tensor that
	// it opens for openPays, that is, for 16 KiB of control parts: those have limits of
	// their own.
	placing   = 2
	workBytes = 256
	payBytes  = 1 << 10
	openPays  = 64
	// thinDebt is how far ahead of its rate a connection may be before it waits:
	// a timer for each frame would cost more than the frame.
	thinDebt = 5 * time.Millisecond
)

// frames is a *wire.Conn.
type frames interface {
	session.Conn
	Context() context.Context
	Control() int
	Excuse()
}

// rateLimit is the frames of a session or a push, of which the connection may send at a
// rate those that neither bring bytes nor open anything: a frame costs the same work
// for one byte as for a thousand, and what a frame repeats is read all the same. That
// work is done at the expense of everybody's latency.
type rateLimit struct {
	frames
	thin     *rate.Limiter // of the connection
	opened   atomic.Int64  // tensors
	received *inbound.RPC

	owed int   // the last frame's work; belongs to the goroutine that receives, as below
	seen int64 // of opened, before that frame
}

// Holds charges what is kept of what the peer has said.
func (r *rateLimit) Holds(bytes int64) { r.received.Holds(bytes) }

// Take is Holds for what there must be memory for.
func (r *rateLimit) Take(bytes int64) bool { return r.received.Take(bytes) }

// Opened counts a tensor that the peer has opened.
func (r *rateLimit) Opened() { r.opened.Add(1) }

// Recv returns the next frame, when the last one's time is over or the RPC has ended.
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

// wait lets n thin frames' time pass.
func (r *rateLimit) wait(n int) {
	delay := price(r.thin, n)
	if delay == 0 {
		return
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-r.Context().Done(): // the next Recv says so
	}
}

// price is how long to wait for n thin frames' time. None costs more than the limiter
// gives at a time.
func price(thin *rate.Limiter, n int) time.Duration {
	if delay := thin.ReserveN(time.Now(), min(n, thin.Burst())).Delay(); delay >= thinDebt {
		return delay
	}
	return 0
}
