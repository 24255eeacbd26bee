package storing

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/internal/serving"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

// Conn carries the frames of a push or a pull.
type Conn interface {
	serving.Conn
	Context() context.Context // the context of its RPC
}

// Push carries a PushTensors: a session with one put, whose client hears nothing before the
// answer, which has the summaries.
func (s *Service) Push(from *admission.Caller, conn Conn, answer func([]frame.Summary) error) error {
	sess, err := s.OpenOneWay(from, serving.Push, PushTensors)
	if err != nil {
		return err
	}
	p := &pushConn{Conn: conn, session: sess}
	p.gate = session.Gate{Kind: "push", Parts: "descs, chunks and failures", New: p.announced}
	cause := sess.Serve(conn.Context(), p)
	s.ended(sess, sess.ID(), cause)
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.done == nil && !errors.Is(cause, serving.ErrServed):
		return cause
	case p.done != nil && p.done.Code != frame.OK:
		return terms.RefusedBy(p.done)
	}
	ended := make(chan error, 1)
	list := p.summaries
	s.Go(func() { ended <- answer(list) }) // ends with the RPC
	idle := time.NewTimer(time.Duration(s.Session.ChunkIdle))
	defer idle.Stop()
	select {
	case err := <-ended:
		return err
	case <-idle.C:
		return frame.Errorf(frame.DeadlineExceeded, "the client has not read the answer")
	}
}

// ended records why a push or a pull ended before its call did: its client may ask as soon as
// the RPC has ended.
func (s *Service) ended(sess *serving.Session, id tensor.ID, cause error) {
	code, text := s.Status(cause)
	if r := s.log.openOn(sess, id); r != nil && s.log.end(r, code, text) {
		s.TransferEnded(r.Kind, code, r.bytes.Load())
	}
}

// pushConn makes frames of a session of those of a push.
type pushConn struct {
	Conn
	session *serving.Session
	gate    session.Gate // its Call is zero before the first frame
	tensors uint64       // belongs to the receiving goroutine
	over    bool         // the put's end was passed on

	kept atomic.Int64 // bytes, of what the answer will have
	held atomic.Int64 // bytes, of what the session retains

	mu        sync.Mutex // guards all below
	open      int
	failed    bool
	summaries []frame.Summary
	done      *frame.Done
}

// Recv returns the next frame, and its chunk by itself, when that has a place: until then
// nothing more is read, and HTTP/2 makes the client wait.
func (p *pushConn) Recv() (*frame.Frame, error) {
	return p.gate.Recv(p.receive, p.Context().Done(), p.session.Stopped())
}

// Take charges what the session retains, and what the answer will have.
func (p *pushConn) Take(bytes int64) bool {
	p.held.Store(bytes)
	return p.Conn.Take(bytes + p.kept.Load())
}

// Free ends the loan of the last frame, unless something of it is left.
func (p *pushConn) Free() {
	if !p.gate.Left() {
		p.Conn.Free()
	}
}

// receive returns the next frame as one of a session.
func (p *pushConn) receive() (*frame.Frame, error) {
	if p.over {
		return nil, io.EOF
	}
	f, err := p.Conn.Recv()
	first := p.gate.Call.IsZero()
	switch {
	case errors.Is(err, io.EOF) && !first:
		p.over = true
		p.gate.WaitAll(p.Context().Done(), p.session.Stopped()) // why one has no place counts more than the end
		return &frame.Frame{Ends: []frame.End{{Call: p.gate.Call, Tensors: p.tensors}}}, nil
	case err != nil && !errors.Is(err, io.EOF):
		return nil, err
	case first && (err != nil || f.Hello == nil):
		return nil, frame.Errorf(frame.InvalidArgument, "the first frame has no hello; a push begins with one")
	case !first && f.Hello != nil:
		return nil, frame.Errorf(frame.InvalidArgument, "a second hello came; a push has only one")
	case len(f.Summaries) > 0:
		return nil, frame.Errorf(frame.InvalidArgument, "a summary came from the client; only a server sends summaries")
	case first:
		p.gate.Call = f.Hello.Session
	}
	if err := p.gate.Pass(f); err != nil {
		return nil, err
	}
	if first {
		h := *f.Hello
		h.AllowanceBytes, h.MaxOpenTensors, h.Lanes = 0, 0, 0
		f.Hello = &h
		f.Calls = append(f.Calls, frame.Call{ID: h.Session, Put: new(frame.Put)})
	}
	return f, nil
}

// announced counts a new tensor.
func (p *pushConn) announced(d *frame.Desc) error {
	if p.tensors++; p.tensors > Tensors {
		return frame.Errorf(frame.ResourceExhausted, "tensors of a push: the limit is %d; use several", Tensors)
	}
	p.mu.Lock()
	p.open++
	p.mu.Unlock()
	if kept := p.kept.Add(pushedBytes + int64(len(d.Name))); !p.Conn.Take(kept + p.held.Load()) {
		return serving.TryLater(reason.Memory, "memory: not enough to keep what this push announces; announce fewer tensors at a time, or try again later")
	}
	return nil
}

// Send keeps what the machine says for the answer: nothing else reaches the client.
func (p *pushConn) Send(f *frame.Frame, held interface{ Release() }) error {
	if held != nil {
		held.Release()
	}
	p.gate.Sent(f)
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range f.Summaries {
		p.gate.Over(s.Tensor)
		p.open--
		p.failed = p.failed || s.Code != frame.OK
		s.Call = tensor.ID{}
		p.summaries = append(p.summaries, s)
	}
	for i := range f.Dones {
		d := f.Dones[i]
		p.done = &d
	}
	// Of a push that cannot go on, the client learns at once, not after sending the rest.
	if p.done != nil || p.failed && p.open == 0 {
		p.session.Stop(serving.ErrServed)
	}
	return nil
}

// Pull carries a PullTensors: a session with one get, whose client says nothing after the
// request. h is the client's hello.
func (s *Service) Pull(from *admission.Caller, conn Conn, h *frame.Hello, list []frame.Selection) error {
	if bad := check(list); bad != nil { // before a hello is sent
		return bad
	}
	sess, err := s.OpenOneWay(from, serving.Pull, 1)
	if err != nil {
		return err
	}
	p := &pullConn{Conn: conn, hello: *h, list: list}
	p.hello.AllowanceBytes, p.hello.MaxOpenTensors, p.hello.Lanes = 0, 0, 0
	cause := sess.Serve(conn.Context(), p)
	s.ended(sess, h.Session, cause)
	if d := p.done.Load(); d != nil && d.Code != frame.OK {
		return terms.RefusedBy(d)
	} else if d != nil {
		return nil
	}
	return cause
}

// pullConn makes frames of a pull of those of a session.
type pullConn struct {
	Conn
	hello    frame.Hello
	list     []frame.Selection
	asked    bool
	greeting *frame.Hello // to be sent with the next frame; of the sending side
	done     atomic.Pointer[frame.Done]
}

// Recv returns the one frame that the request makes.
func (p *pullConn) Recv() (*frame.Frame, error) {
	if p.asked {
		return nil, io.EOF
	}
	p.asked = true
	call := frame.Call{ID: p.hello.Session, Get: &frame.Get{Selections: p.list}}
	return &frame.Frame{Hello: &p.hello, Calls: []frame.Call{call}}, nil
}

// Free does nothing: no frame was received.
func (*pullConn) Free() {}

// Send sends what a pull consists of.
func (p *pullConn) Send(f *frame.Frame, held interface{ Release() }) error {
	for i := range f.Dones {
		d := f.Dones[i]
		p.done.Store(&d)
	}
	f.Credits, f.Acks, f.Dones, f.Failures, f.Drain = nil, nil, nil, nil, nil
	if h := f.Hello; h != nil { // a pull that is refused has none
		p.greeting = &frame.Hello{Version: h.Version, Session: h.Session, MaxChunkBytes: h.MaxChunkBytes, Checksum: h.Checksum, ChunkIdleMillis: h.ChunkIdleMillis}
		f.Hello = nil
	}
	for i := range f.Descs {
		d := &f.Descs[i]
		d.Call, d.RetainChunks, d.Held = tensor.ID{}, 0, false
	}
	for i := range f.Summaries {
		f.Summaries[i].Call = tensor.ID{}
	}
	if f.Empty() {
		return nil
	}
	if h := p.greeting; h != nil {
		p.greeting = nil
		if err := p.Conn.Send(&frame.Frame{Hello: h}, nil); err != nil {
			if held != nil {
				held.Release()
			}
			return err
		}
	}
	return p.Conn.Send(f, held)
}
