package server

import (
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"

	"github.com/tensorferry/tensorferry/internal/wire"
)

const (
	// thinBytes is the payload from which on a frame is worth its handling: at so many
	// bytes each, DefaultThinFrames carry 10 MB/s.
	thinBytes = 1 << 10
	// thinDebt is how far ahead of the pace a connection may be before it waits:
	// a timer for each frame would cost more than the frame.
	thinDebt = 5 * time.Millisecond
)

// paced is the gRPC stream of a session or a push whose connection may send thin
// frames at a pace only. A frame costs the same work whether it carries one byte or
// a thousand, and the work is done at the expense of everybody's latency. Who opens
// calls or tensors with a frame is held back by the limits of those.
type paced struct {
	grpc.ServerStream
	thin *rate.Limiter // of the connection
}

// RecvMsg returns the next frame, when its time has come or the RPC has ended.
func (p paced) RecvMsg(m any) error {
	if err := p.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	f := &m.(*wire.Message).Frame
	if len(f.Calls)+len(f.Descs) > 0 || f.Chunk.Len() >= thinBytes {
		return nil
	}
	wait := p.thin.Reserve().Delay()
	if wait < thinDebt {
		return nil
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-p.Context().Done(): // what comes of it is told with the next frame
	}
	return nil
}
