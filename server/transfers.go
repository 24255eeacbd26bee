package server

import (
	"context"
	"sync/atomic"

	"google.golang.org/grpc"

	"github.com/tensorferry/tensorferry/internal/serving"
	"github.com/tensorferry/tensorferry/internal/wire"
)

// transfer has the work of a transfer done on a goroutine of its own, since
// nothing but the end of the RPC wakes one that waits for its peer, and returns
// what the RPC ends with. The work ends soon after; Close waits for it.
func (s *Server) transfer(conn grpc.ServerStream, k serving.Direction, work func(*idleTimeout) (*record, error)) error {
	if err := s.core.Begin(); err != nil {
		return statusOf(err)
	}
	defer s.core.End()
	one := s.connections.of(conn.Context())
	if err := s.core.Enter(serving.Transfers, &one.Caller); err != nil {
		return statusOf(err)
	}
	s.core.TransferOpened(k)

	expired := make(chan struct{}, 1)
	w := newIdleTimeout(&rateLimit{frames: wire.NewConn(conn, &one.flight), thin: one.thin, opened: new(atomic.Int64)}, k, s.limits, func() {
		select {
		case expired <- struct{}{}:
		default: // it was said before
		}
	})
	ended := make(chan error, 1)
	var gone atomic.Pointer[error] // why the RPC has ended before the work
	s.core.Go(func() {             // ends when its RPC has
		var r *record
		err := s.survive(func() (err error) {
			r, err = work(w)
			return err
		})
		w.timer.Stop()
		if first := gone.Load(); first != nil {
			err = *first
		}
		s.transferLog.end(r, statusOf(err))
		s.core.Leave(serving.Transfers, &one.Caller)
		var bytes int64
		if r != nil {
			bytes = r.bytes.Load()
		}
		code, _ := statusParts(statusOf(err))
		s.core.TransferEnded(k, code, bytes)
		ended <- err
	})
	var err error
	select {
	case err = <-ended:
		return statusOf(err)
	case <-expired:
		err = w.err()
	case <-conn.Context().Done():
		err = context.Cause(conn.Context())
	case <-s.core.Done():
		err = serving.ErrShutdown
	}
	gone.Store(&err)
	return statusOf(err)
}

// survive runs code that may be a user's and makes an error of its panic: off the
// RPC's own goroutine no interceptor does.
func (s *Server) survive(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			s.core.Panicked(p)
			err = errInternal
		}
	}()
	return f()
}
