package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// PushRequest describes a push.
type PushRequest struct {
	// Tensors are stored under their Names, which must differ; Port is ignored. They are read
	// one after another, in this order.
	Tensors []Input
	// Progress, if not nil, is called when some more of a tensor is on its way, on the
	// goroutine of Push.
	Progress func(Progress)
}

// Push stores tensors on the server and returns their summaries, in the order of the
// request. The error joins those of the summaries, or says what ended the push. A tensor
// whose summary has no error is stored. Push shares the inputs until it returns.
func (c *Client) Push(ctx context.Context, r PushRequest) ([]Summary, error) {
	return c.push(ctx, r, false)
}

// PutAll is like Push, but stores all of the tensors together, or none: nobody sees some of
// them. If it fails, every summary has an error. The server's store must support it.
func (c *Client) PutAll(ctx context.Context, r PushRequest) ([]Summary, error) {
	return c.push(ctx, r, true)
}

func (c *Client) push(ctx context.Context, r PushRequest, together bool) ([]Summary, error) {
	out := make([]Summary, len(r.Tensors))
	var all []*pushed
	names := make(map[string]struct{}, len(r.Tensors))
	for i := range r.Tensors {
		in := &r.Tensors[i]
		out[i] = Summary{Name: in.Name, Desc: in.Desc}
		size, err := in.check()
		if in.Next != nil {
			err = fmt.Errorf("%w: tensor %q: Push does not support Next; use Reader", ErrInput, in.Name)
		}
		if _, twice := names[in.Name]; err == nil && twice {
			err = fmt.Errorf("%w: two tensors are named %q", ErrInput, in.Name)
		}
		names[in.Name] = struct{}{}
		out[i].Bytes, out[i].Err = size, err
		t := &pushed{client: c, in: in, out: &out[i], over: err != nil, letGo: make(chan struct{})}
		t.refs.Store(1)
		all = append(all, t)
	}
	var err error
	if bad := errorsOf(out); together && bad != nil {
		err = fmt.Errorf("%w: nothing was stored, because another tensor of the set is invalid", ErrInput)
	} else {
		err = c.pushAll(ctx, all, r.Progress, together)
	}
	for _, t := range all {
		t.end(err)
		t.Release()
		<-t.letGo
	}
	return out, errorsOf(out)
}

// pushAll sends tensors over the client's session or, if the server's sessions do not store,
// one by one as it can.
func (c *Client) pushAll(ctx context.Context, all []*pushed, progress func(Progress), together bool) error {
	s, err := c.sharedSession(ctx)
	if err != nil {
		return err
	}
	if s.stores() {
		return c.put(ctx, s, tensor.ID{}, all, progress, together)
	}
	if together {
		return &Error{Code: codes.FailedPrecondition, Message: "this server cannot store several tensors together; push them one by one"}
	}
	for i, t := range all {
		if t.over {
			continue
		}
		id := tensor.NewID()
		one, err := c.pushSession(ctx, s, id)
		if err != nil {
			return err
		}
		err = c.put(ctx, one, id, all[i:i+1], progress, false)
		_ = one.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// putting is a put.
type putting struct {
	session *Session
	id      tensor.ID
	rest    *restClock
	news    chan struct{}      // capacity 1: a tensor has ended
	ctx     context.Context    // ends with the call
	cancel  context.CancelFunc // of ctx
	closed  chan struct{}      // closed by the session's last event of the call

	progress func(Progress)
	said     []*pushed // on their way, in order, for progress

	// Guarded by the session's lock until closed.
	byID  map[tensor.ID]*pushed
	bytes int64 // of the tensors in byID
	done  frame.Done
	cause error // why this side ended the call
}

// pushed is one tensor of a push.
type pushed struct {
	client *Client
	in     *Input
	out    *Summary
	over   bool
	moved  atomic.Int64 // bytes that the server has
	told   int64        // of them, to Progress
	refs   atomic.Int32
	letGo  chan struct{}  // closed when refs is 0
	sent   bool           // all of it was offered: out.Digest is valid
	sum    *frame.Summary // guarded by the session's lock until the call is closed
	failed error          // why the input could not be read; likewise
}

// put sends tensors in one call. An error is that of the call.
func (c *Client) put(ctx context.Context, s *Session, id tensor.ID, list []*pushed, progress func(Progress), together bool) error {
	if id.IsZero() {
		id = tensor.NewID()
	}
	p := &putting{session: s, id: id, progress: progress, news: make(chan struct{}, 1), closed: make(chan struct{}), byID: make(map[tensor.ID]*pushed)}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	defer p.cancel()
	if err := s.open(ctx, frame.Call{ID: id, Put: &frame.Put{All: together}}, p); err != nil {
		return err
	}
	p.rest = s.rests("the push", p.stop, p.closed)
	defer context.AfterFunc(ctx, func() { p.stop(context.Cause(ctx)) })()
	for _, t := range list {
		if t.out.Transfer = id; t.over {
			continue
		}
		if p.said = append(p.said, t); !p.send(t) {
			break
		}
	}
	p.rest.end()
	s.sess.Do(func(m *stream.Machine, now stream.Instant) { m.EndPut(now, id) })
	for over := false; !over; p.report() {
		select {
		case <-p.news:
		case <-p.closed:
			over = true
		}
	}
	err := endError(ctx, &p.done, p.cause)
	for _, t := range list {
		if !together || err == nil {
			t.judge()
		} else if t.failed != nil {
			t.end(t.failed)
		}
	}
	if err == nil {
		for _, t := range list {
			t.end(&Error{Code: codes.Internal, Message: "the server ended the push without mentioning a tensor"})
		}
	}
	for _, t := range p.said {
		if t.over && t.out.Err == nil { // a view of it may still be held
			t.moved.Store(t.out.Bytes)
		}
	}
	p.report()
	return err
}

// report tells Progress what has moved.
func (p *putting) report() {
	if p.progress == nil {
		return
	}
	for _, t := range p.said {
		if moved := min(t.moved.Load(), t.out.Bytes); moved > t.told {
			t.told = moved
			p.progress(Progress{t.in.Name, moved, t.out.Bytes})
		}
	}
	p.said = slices.DeleteFunc(p.said, func(t *pushed) bool { return t.told == t.out.Bytes })
}

// judge ends a tensor that has a Summary.
func (t *pushed) judge() {
	s := t.sum
	switch {
	case t.failed != nil:
		t.end(t.failed)
	case s == nil:
		return
	case s.Code != frame.OK:
		s.Name = t.in.Name
		t.end(summaryError(s))
	case !t.sent || s.Digest != t.out.Digest:
		t.end(&Error{Code: codes.DataLoss, Message: fmt.Sprintf("tensor %q: the server stored %v, the client sent %v", t.in.Name, s.Digest, t.out.Digest)})
	default:
		t.out.Durable = s.Durable
		t.end(nil)
	}
}

// end records the outcome of the tensor.
func (t *pushed) end(err error) {
	if !t.over {
		t.over, t.out.Err = true, err
	}
}

// send sends one tensor. It returns false when the call is over.
func (p *putting) send(t *pushed) bool {
	s := p.session
	id := tensor.NewID()
	var limit int64
	for most := 1; ; { // wait for a place among the tensors on their way
		room := false
		s.sess.Do(func(m *stream.Machine, _ stream.Instant) {
			st := m.Status()
			most, limit = min(max(st.PeerTensors/2, 1), pushTensors), st.PeerChunkBytes
			if room = len(p.byID) == 0 || len(p.byID) < most && p.bytes+t.out.Bytes <= pushBytes; room {
				p.byID[id] = t
				p.bytes += t.out.Bytes
				m.Patience(p.id, stream.Instant(s.client.cfg.StallTimeout)+stream.Instant(p.bytes/silentRate)*stream.Instant(time.Second))
				s.wantLane(m, t.out.Bytes)
			}
		})
		if room {
			break
		}
		p.report()
		select {
		case <-p.news:
		case <-p.closed:
			return false
		}
	}
	p.rest.of(named("tensor", t.in.Name))
	_, chunk, err := session.ChunkFor(t.in.Desc, limit)
	f := session.Feed{Session: s.sess, View: p.view(t), Pieces: pushPieces, Step: p.report, Moved: func(n int64) {
		t.moved.Add(n)
		tell(p.news)
	}}
	if err == nil {
		t.out.Digest, err = f.Run(p.ctx, frame.Desc{
			Tensor: id, Desc: t.in.Desc.Clone(), ChunkBytes: uint32(chunk), Call: p.id, Name: t.in.Name, Metadata: t.in.Metadata,
		})
	}
	switch t.sent = err == nil; {
	case err == nil || errors.Is(err, stream.ErrClosed): // or it has a Summary
		return true
	case p.ctx.Err() != nil:
		return false
	}
	if source, ok := errors.AsType[*session.SourceError](err); ok {
		err = source.Err
	}
	s.sess.Do(func(m *stream.Machine, _ stream.Instant) {
		t.failed = err
		if !m.GiveUp(id, frame.Cancelled, "the client could not read all of it") {
			p.ended(t, id)
		}
	})
	return true
}

// view returns a function that shares the next bytes of a tensor.
func (p *putting) view(t *pushed) func(off, n int64) ([]byte, interface{ Release() }, error) {
	return func(off, n int64) ([]byte, interface{ Release() }, error) {
		if t.in.Reader == nil {
			t.refs.Add(1)
			return t.in.Data[off : off+n : off+n], t, nil
		}
		s, err := t.client.pool.Get(int(n))
		if err != nil {
			return nil, nil, fmt.Errorf("client: tensor %q: %w", t.in.Name, err)
		}
		p.rest.start()
		got, err := io.ReadFull(t.in.Reader, s.Bytes())
		p.rest.stop()
		if err != nil {
			s.Release()
			return nil, nil, fmt.Errorf("%w: tensor %q ended after %d of %d bytes: %w", ErrInput, t.in.Name, off+int64(got), t.out.Bytes, err)
		}
		return s.Bytes(), s, nil
	}
}

// Release ends the sharing of a view, or of the input itself.
func (t *pushed) Release() {
	if t.refs.Add(-1) == 0 {
		if t.in.Release != nil {
			t.in.Release()
		}
		close(t.letGo)
	}
}

// ended takes a tensor out of those on their way; the session is locked.
func (p *putting) ended(t *pushed, id tensor.ID) {
	delete(p.byID, id)
	p.bytes -= t.out.Bytes
	tell(p.news)
}

// event implements handler.
func (p *putting) event(_ *stream.Machine, _ stream.Instant, e stream.Event) {
	t := p.byID[e.Tensor]
	switch {
	case e.Kind == stream.EventSummary && t != nil:
		t.sum = e.Summary
		p.ended(t, e.Tensor)
	case e.Kind == stream.EventFailed && t != nil: // its bytes vanished
		t.failed = &Error{Code: codes.DataLoss, Message: fmt.Sprintf("tensor %q: %s", t.in.Name, e.Text)}
	case e.Kind == stream.EventStop && p.cause == nil:
		p.cause = p.session.client.stalled(e)
	case e.Kind == stream.EventClosed:
		p.done = *e.Done
		p.cancel()
		close(p.closed)
	}
}

// stop cancels the call with a cause on this side.
func (p *putting) stop(cause error) {
	p.session.sess.Do(func(m *stream.Machine, _ stream.Instant) { p.session.stop(m, p.id, &p.cause, cause) })
}
