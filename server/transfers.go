package server

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
)

// transfers counts the pushes and pulls of a server.
type transfers struct {
	most       int          // open at a time
	unanswered atomic.Int64 // and Computes: what a server that is shut down waits for

	mu   sync.Mutex
	open int // guarded by mu
}

// enter counts a transfer that begins, or says why it may not; leave follows.
func (ts *transfers) enter(c *connection) error {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if ts.open >= ts.most && c.transfers.Load() >= ownOpen {
		return errTransfers(ts.most)
	}
	ts.open++
	c.transfers.Add(1)
	return nil
}

func (ts *transfers) leave(c *connection) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	ts.open--
	c.transfers.Add(-1)
}

// wait waits until everything that was admitted has been answered, or ctx ends. No
// more may be admitted.
func (ts *transfers) wait(ctx context.Context) error {
	t := time.NewTicker(drainPoll)
	defer t.Stop()
	for ts.unanswered.Load() > 0 {
		select {
		case <-t.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// admit lets a transfer or a Compute begin, which counts as unanswered from then on,
// or says why it may not.
func (s *Server) admit() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining {
		return errDraining
	}
	s.transfers.unanswered.Add(1)
	return nil
}

// transfer has the work of a transfer done on a goroutine of its own, since
// nothing but the end of the RPC wakes one that waits for its peer, and returns
// what the RPC ends with. The work ends soon after; Close waits for it.
func (s *Server) transfer(conn grpc.ServerStream, k kind, work func(*watched) (*record, error)) error {
	if err := s.admit(); err != nil {
		return err
	}
	defer s.transfers.unanswered.Add(-1)
	one := s.connections.of(conn.Context())
	if err := s.transfers.enter(one); err != nil {
		return err
	}
	s.work.Add(1)
	s.transferOpened(k)

	stalled := make(chan struct{}, 1)
	w := newWatched(&paced{ServerStream: conn, thin: one.thin}, k, s.limits, func() {
		select {
		case stalled <- struct{}{}:
		default: // it was said before
		}
	})
	ended := make(chan error, 1)
	var gone atomic.Pointer[error] // why the RPC has ended before the work
	go func() {                    // ends when its RPC has
		defer s.work.Done()
		var r *record
		err := s.survive(func() (err error) {
			r, err = work(w)
			return err
		})
		w.timer.Stop()
		if first := gone.Load(); first != nil {
			err = *first
		}
		s.records.end(r, sessionStatus(err))
		s.transfers.leave(one)
		var bytes int64
		if r != nil {
			bytes = r.bytes.Load()
		}
		code, _ := statusParts(sessionStatus(err))
		s.transferEnded(k, code, bytes)
		ended <- err
	}()
	var err error
	select {
	case err = <-ended:
		return sessionStatus(err)
	case <-stalled:
		err = w.stalled()
	case <-conn.Context().Done():
		err = context.Cause(conn.Context())
	case <-s.closing:
		err = errShutdown
	}
	gone.Store(&err)
	return sessionStatus(err)
}

// survive runs code that may be a user's and makes an error of its panic: off the
// RPC's own goroutine no interceptor does.
func (s *Server) survive(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = s.panicked(p)
		}
	}()
	return f()
}
