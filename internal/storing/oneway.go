package storing

import (
	"context"
	"errors"
	"io"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/internal/failures"
	"github.com/tensorferry/tensorferry/internal/serving"
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
	p := &pushConn{Conn: conn, session: sess, placed: make(map[tensor.ID]chan struct{})}
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

// pushConn makes frames of a session of those of a push, on which no credit can be sent: it
// holds chunks back until their tensor has its place, and nothing more is read until then.
type pushConn struct {
	Conn
	session *serving.Session

	// Of the receiving goroutine.
	call    tensor.ID   // zero before the first frame
	chunk   frame.Frame // the last frame's chunk by itself
	left    bool        // it is not returned yet
	tensors uint64
	over    bool // the put's end was passed on

	kept atomic.Int64 // bytes, of what the answer will have
	held atomic.Int64 // bytes, of what the session retains

	mu        sync.Mutex                  // guards all below
	placed    map[tensor.ID]chan struct{} // closed when the tensor has its place, or has ended
	open      int
	failed    bool
	summaries []frame.Summary
	done      *frame.Done
}

// Recv returns the next frame, and its chunk by itself.
func (p *pushConn) Recv() (*frame.Frame, error) {
	if !p.left {
		f, err := p.receive()
		if err != nil || !f.HasChunk() {
			return f, err
		}
		p.chunk = frame.Frame{Chunk: f.Chunk}
		f.Chunk = frame.Chunk{}
		if p.left = !f.Empty(); p.left {
			return f, nil
		}
	}
	p.left = false
	p.wait(p.of(p.chunk.Chunk.Tensor))
	return &p.chunk, nil
}

// Take charges what the session retains, and what the answer will have.
func (p *pushConn) Take(bytes int64) bool {
	p.held.Store(bytes)
	return p.Conn.Take(bytes + p.kept.Load())
}

// Free ends the loan of the last frame, unless its chunk is left.
func (p *pushConn) Free() {
	if !p.left {
		p.Conn.Free()
	}
}

// receive returns the next frame as one of a session.
func (p *pushConn) receive() (*frame.Frame, error) {
	if p.over {
		return nil, io.EOF
	}
	f, err := p.Conn.Recv()
	first := p.call.IsZero()
	switch {
	case errors.Is(err, io.EOF) && !first:
		p.over = true
		p.mu.Lock()
		all := slices.Collect(maps.Values(p.placed))
		p.mu.Unlock()
		for _, placed := range all { // why one has no place counts more than the end
			p.wait(placed)
		}
		return &frame.Frame{Ends: []frame.End{{Call: p.call, Tensors: p.tensors}}}, nil
	case err != nil && !errors.Is(err, io.EOF):
		return nil, err
	case first && (err != nil || f.Hello == nil):
		return nil, frame.Errorf(frame.InvalidArgument, "the first frame has no hello; a push begins with one")
	case !first && f.Hello != nil:
		return nil, frame.Errorf(frame.InvalidArgument, "a second hello came; a push has only one")
	case len(f.Summaries) > 0:
		return nil, frame.Errorf(frame.InvalidArgument, "a summary came from the client; only a server sends summaries")
	case len(f.Calls)+len(f.Credits)+len(f.Acks)+len(f.Cancels)+len(f.Dones)+len(f.Ends) > 0 || f.Drain != nil:
		return nil, frame.Errorf(frame.InvalidArgument, "a push has descs, chunks and failures; calls, credits, acks and their like are of sessions")
	case first:
		h := *f.Hello
		h.AllowanceBytes, h.MaxOpenTensors, h.Lanes = 0, 0, 0
		p.call, f.Hello = h.Session, &h
		f.Calls = append(f.Calls, frame.Call{ID: h.Session, Put: new(frame.Put)})
	}
	for i := range f.Descs {
		d := &f.Descs[i]
		if !d.Call.IsZero() {
			f.Failures = append(f.Failures, frame.Failure{Tensor: d.Tensor, Code: frame.InvalidArgument, Message: "it belongs to a call; a push has no calls"})
		}
		d.Call, d.OnAllowance, d.RetainChunks, d.Held = p.call, false, 0, false
		if err := p.announced(d); err != nil {
			return nil, err
		}
	}
	for _, x := range f.Failures {
		if p.of(x.Tensor) == nil {
			return nil, frame.Errorf(frame.NotFound, "failure of tensor %s, which was not announced", x.Tensor)
		}
		p.place(x.Tensor)
	}
	if f.HasChunk() && p.of(f.Chunk.Tensor) == nil {
		return nil, frame.Errorf(frame.NotFound, "chunk %d of tensor %s, which was not announced; send its desc first", f.Chunk.Index, f.Chunk.Tensor)
	}
	return f, nil
}

// announced counts a tensor, if it is new.
func (p *pushConn) announced(d *frame.Desc) error {
	if p.of(d.Tensor) != nil {
		return nil
	}
	if p.tensors++; p.tensors > Tensors {
		return frame.Errorf(frame.ResourceExhausted, "tensors of a push: the limit is %d; use several", Tensors)
	}
	p.mu.Lock()
	p.open++
	p.placed[d.Tensor] = make(chan struct{})
	p.mu.Unlock()
	if kept := p.kept.Add(pushedBytes + int64(len(d.Name))); !p.Conn.Take(kept + p.held.Load()) {
		return failures.TryLater(reason.Memory, "memory: not enough to keep what this push announces; announce fewer tensors at a time, or try again later")
	}
	return nil
}

// of returns what is closed when a tensor has its place, or has ended; nil if it was not announced.
func (p *pushConn) of(id tensor.ID) chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.placed[id]
}

// place lets the chunks of a tensor through: each has its place, or the tensor has ended.
func (p *pushConn) place(id tensor.ID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	placed := p.placed[id]
	select {
	case <-placed:
	default:
		if placed != nil {
			close(placed)
		}
	}
}

// wait waits for a channel, or for the end of the push.
func (p *pushConn) wait(placed <-chan struct{}) {
	select {
	case <-placed:
	case <-p.Context().Done():
	case <-p.session.Stopped():
	}
}

// Send keeps what the machine says for the answer: nothing else reaches the client.
func (p *pushConn) Send(f *frame.Frame, held interface{ Release() }) error {
	if held != nil {
		held.Release()
	}
	for _, c := range f.Credits {
		p.place(c.Tensor)
	}
	for _, x := range f.Failures {
		p.place(x.Tensor)
	}
	for _, s := range f.Summaries {
		p.place(s.Tensor)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range f.Summaries {
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
