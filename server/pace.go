package server

import (
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"

	"github.com/tensorferry/tensorferry/internal/wire"
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
	// thinDebt is how far ahead of the pace a connection may be before it waits:
	// a timer for each frame would cost more than the frame.
	thinDebt = 5 * time.Millisecond
)

// paced is the gRPC stream of a session or a push, whose connection may send at a
// pace only what neither brings bytes nor opens anything: a frame costs the same work
// for one byte as for a thousand, and what a frame repeats is read all the same. That
// work is done at the expense of everybody's latency.
type paced struct {
	grpc.ServerStream
	thin   *rate.Limiter // of the connection
	opened *atomic.Int64 // calls and tensors; their owner counts

	owed int   // the last frame's work; belongs to the goroutine that receives, as below
	seen int64 // of opened, before that frame
}

// RecvMsg returns the next frame, when the last one's time is over or the RPC has ended.
func (p *paced) RecvMsg(m any) error {
	opened := p.opened.Load()
	if n := p.owed - openPays*int(opened-p.seen); n > 0 {
		p.wait(n)
	}
	p.owed, p.seen = 0, opened
	if err := p.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	msg := m.(*wire.Message)
	p.owed = 1 + msg.Control/workBytes - msg.Frame.Chunk.Len()/payBytes
	if msg.Frame.HasChunk() {
		p.owed += placing
	}
	return nil
}

// wait lets n thin frames' time pass.
func (p *paced) wait(n int) {
	// No frame may cost more than the limiter gives at a time.
	delay := p.thin.ReserveN(time.Now(), min(n, p.thin.Burst())).Delay()
	if delay < thinDebt {
		return
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-p.Context().Done(): // the next RecvMsg says so
	}
}
