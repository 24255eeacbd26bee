package server

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// transfers knows the pushes and pulls that are open, and the last that ended.
type transfers struct {
	most       int          // open at a time
	unanswered atomic.Int64 // and Computes: what a server that is shut down waits for

	mu    sync.Mutex // guards all below, and what is in the records
	byID  map[tensor.ID]*record
	ended []*record // oldest first
	open  int
	kept  int // tensors in records that ended
}

// record is what is known of one transfer.
type record struct {
	id      tensor.ID
	push    bool
	open    bool
	code    stream.Code
	message string
	began   time.Time
	tensors []*moved // the last recordTensors that were announced
	bytes   atomic.Int64
}

// moved is how far one tensor of a transfer is.
type moved struct {
	summary stream.Summary
	open    bool
	bytes   atomic.Int64
}

// begin opens a record, or says why the transfer is refused.
func (ts *transfers) begin(id tensor.ID, push bool) (*record, error) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if r := ts.byID[id]; r != nil && r.open {
		return nil, errTransferExists(id)
	}
	r := &record{id: id, push: push, open: true, began: time.Now()}
	if ts.byID == nil {
		ts.byID = make(map[tensor.ID]*record)
	}
	ts.byID[id] = r
	return r, nil
}

// enter counts a transfer that has not said its name yet.
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

// leave ends a transfer; r is nil if it never said its name.
func (ts *transfers) leave(c *connection, r *record, err error) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	ts.open--
	c.transfers.Add(-1)
	if r == nil {
		return
	}
	r.open = false
	r.code, r.message = statusParts(err)
	for _, m := range r.tensors {
		if m.open { // it ends with the transfer
			m.open = false
			m.summary.Code, m.summary.Message = r.code, r.message
		}
	}
	ts.ended = append(ts.ended, r)
	ts.kept += len(r.tensors)
	for len(ts.ended) > recordsKept || ts.kept > recordTensorsKept && len(ts.ended) > 1 {
		old := ts.ended[0]
		ts.ended[0] = nil
		ts.ended = ts.ended[1:]
		ts.kept -= len(old.tensors)
		if ts.byID[old.id] == old {
			delete(ts.byID, old.id)
		}
	}
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

// tensor adds a tensor to a record.
func (ts *transfers) tensor(r *record, id tensor.ID, name string, size uint64) *moved {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	m := &moved{summary: stream.Summary{Tensor: id, Name: name, SizeBytes: size}, open: true}
	if len(r.tensors) == recordTensors {
		r.tensors[0] = nil
		r.tensors = r.tensors[1:]
	}
	r.tensors = append(r.tensors, m)
	return m
}

// over notes how a tensor ended.
func (ts *transfers) over(m *moved, s stream.Summary) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	m.summary, m.open = s, false
}

// state copies what GetTransfer tells.
func (ts *transfers) state(id tensor.ID) *pb.GetTransferResponse {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	r := ts.byID[id]
	if r == nil {
		return nil
	}
	out := &pb.GetTransferResponse{
		Open: r.open, Push: r.push, Code: uint32(r.code), Message: r.message, AgeMillis: time.Since(r.began).Milliseconds(),
	}
	for _, m := range r.tensors {
		out.Tensors = append(out.Tensors, &pb.TensorState{
			Summary: wire.ToSummary(&m.summary), Open: m.open, MovedBytes: uint64(m.bytes.Load()),
		})
	}
	return out
}

// watched is the gRPC stream of a transfer, with a clock that runs while this side
// waits for its peer. A frame that moves nothing does not set it back.
type watched struct {
	grpc.ServerStream
	timer *time.Timer
	left  time.Duration // on the clock; belongs to the goroutine of the work, as below
	idle  time.Duration // what it is set back to
	begun atomic.Bool   // the first frame has come
}

// RecvMsg waits for the peer's next frame until the clock has run down.
func (w *watched) RecvMsg(m any) error {
	began := time.Now()
	w.timer.Reset(max(w.left, 0))
	err := w.ServerStream.RecvMsg(m)
	w.timer.Stop()
	if w.left -= time.Since(began); !w.begun.Load() {
		w.begun.Store(true)
		w.moved()
	}
	return err
}

// SendMsg waits until the peer has read, or the clock has run down.
func (w *watched) SendMsg(m any) error {
	w.timer.Reset(w.idle)
	err := w.ServerStream.SendMsg(m)
	w.timer.Stop()
	return err
}

// moved sets the clock back.
func (w *watched) moved() { w.left = w.idle }

// stalled says why the clock has run down.
func (w *watched) stalled(first time.Duration, push bool) error {
	text := fmt.Sprintf("the client has not read for %v; pull again, and read what comes", w.idle)
	switch {
	case push && !w.begun.Load():
		text = fmt.Sprintf("no frame came for %v; a push opens with hello", first)
	case push:
		text = fmt.Sprintf("no chunk came for %v; push again, in smaller chunks if the network is slow", w.idle)
	}
	return &stream.Error{Code: stream.DeadlineExceeded, Text: text}
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
func (s *Server) transfer(conn grpc.ServerStream, kind string, work func(*watched) (*record, error)) error {
	if err := s.admit(); err != nil {
		return err
	}
	defer s.transfers.unanswered.Add(-1)
	one := s.connections.of(conn.Context())
	if err := s.transfers.enter(one); err != nil {
		return err
	}
	s.work.Add(1)
	s.transferOpened(kind)

	stalled := make(chan struct{}, 1)
	first := time.Duration(s.limits.FirstFrame)
	w := &watched{ServerStream: paced{conn, one.thin}, left: first, idle: time.Duration(s.limits.ChunkIdle)}
	w.timer = time.AfterFunc(w.idle, func() {
		select {
		case stalled <- struct{}{}:
		default: // it was said before
		}
	})
	w.timer.Stop()
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
		s.transfers.leave(one, r, sessionStatus(err))
		var bytes int64
		if r != nil {
			bytes = r.bytes.Load()
		}
		code, _ := statusParts(sessionStatus(err))
		s.transferEnded(kind, code, bytes)
		ended <- err
	}()
	var err error
	select {
	case err = <-ended:
		return sessionStatus(err)
	case <-stalled:
		err = w.stalled(first, kind == pushTransfer)
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
