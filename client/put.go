package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/glob"
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
	all := make([]*pushed, len(r.Tensors))
	names := make(map[string]struct{}, len(r.Tensors))
	valid := true
	for i := range r.Tensors {
		in := &r.Tensors[i]
		size, err := in.check()
		if in.Next != nil {
			err = fmt.Errorf("%w: tensor %q: Push does not support Next; use Reader", ErrInput, in.Name)
		}
		if _, twice := names[in.Name]; err == nil && twice {
			err = fmt.Errorf("%w: two tensors are named %q", ErrInput, in.Name)
		}
		names[in.Name] = struct{}{}
		all[i] = &pushed{in: in}
		all[i].Summary = Summary{Name: in.Name, Desc: in.Desc, Bytes: size, Err: err}
		all[i].over, valid = err != nil, valid && err == nil
	}
	c.tally.calls.Add(1)
	var err error
	from := readAgain(r.Tensors)
	for tries := c.tries(); ; c.tally.retries.Add(1) {
		if together && !valid {
			err = fmt.Errorf("%w: nothing was stored, because another tensor of the set is invalid", ErrInput)
		} else {
			err = c.put(ctx, all, r.Progress, together)
		}
		var why error // after which another attempt can succeed
		for _, t := range all {
			if t.end(err); why == nil && retryable(t.Err) {
				why = t.Err
			}
		}
		if from == nil || !tries.again(ctx, why, true) || !tries.rewind(ctx, all, from, together) {
			break
		}
	}
	out := make([]Summary, len(all))
	for i, t := range all {
		t.using.Wait()
		if t.in.Release != nil {
			t.in.Release()
		}
		out[i] = t.Summary
	}
	return out, errorsOf(out)
}

// rewind makes tensors that failed ready for another attempt; but those that the server turns
// out to have are stored. It reports whether any is left.
func (t *tries) rewind(ctx context.Context, all []*pushed, from []int64, together bool) bool {
	ctx, stop := context.WithDeadline(ctx, t.until)
	defer stop()
	var left []int
	stored := make(map[int]*Stored)
	for i, p := range all {
		if !retryable(p.Err) {
			if together { // some of the set can never be stored
				return false
			}
			continue
		}
		has, err := t.client.has(ctx, p)
		if err != nil {
			return false
		}
		if has != nil {
			stored[i] = has
		}
		left = append(left, i)
	}
	if together && len(stored) < len(left) {
		clear(stored)
	}
	for _, i := range left {
		p := all[i]
		if has := stored[i]; has != nil {
			p.Err, p.Durable = nil, has.Durable
			p.stored.Store(true)
			continue
		}
		if p.in.Reader != nil {
			if _, err := p.in.Reader.(io.Seeker).Seek(from[i], io.SeekStart); err != nil {
				return false
			}
		}
		p.Err, p.over, p.failed, p.sum, p.Digest = nil, false, nil, nil, codec.Digest{}
		p.moved.Store(0)
	}
	return len(stored) < len(left)
}

// has returns what the server has stored of a tensor that was pushed, or nil if that is another
// one. It has nothing of one that was not sent as a whole.
func (c *Client) has(ctx context.Context, p *pushed) (*Stored, error) {
	if p.Digest.IsZero() {
		return nil, nil
	}
	list, _, err := c.List(ctx, glob.Quote(p.Name))
	if err != nil || len(list) != 1 || list[0].Digest != p.Digest || !list[0].Equal(p.Desc) {
		return nil, err
	}
	return &list[0], nil
}

// putting is a put.
type putting struct {
	task     // its news: a tensor has ended, or moved
	rest     *restClock
	progress func(Progress)
	together bool
	said     []*pushed // on their way, in order, for progress

	// Guarded by the session's lock until ctx has ended.
	byID  map[tensor.ID]*pushed
	bytes int64 // of the tensors in byID
}

// pushed is one tensor of a push.
type pushed struct {
	transferred
	in     *Input
	using  sync.WaitGroup // views
	stored atomic.Bool
	failed error // why the input could not be read; guarded by the session's lock until the call has ended
}

// put sends tensors in one call. An error is that of the call.
func (c *Client) put(ctx context.Context, list []*pushed, progress func(Progress), together bool) error {
	s, err := c.storingSession(ctx)
	if err != nil {
		return err
	}
	id := tensor.NewID()
	p := &putting{progress: progress, together: together, byID: make(map[tensor.ID]*pushed)}
	none := func(*stream.Machine, stream.Instant) error { return nil }
	if err = p.open(ctx, s, frame.Call{ID: id, Put: &frame.Put{All: together}}, p, none); err != nil {
		return err
	}
	defer p.unhook()
	p.rest = p.rests("push", "")
	for _, t := range list {
		if t.Transfer = id; t.over {
			continue
		}
		if p.said = append(p.said, t); !p.send(t) {
			break
		}
	}
	p.rest.end()
	s.sess.Do(func(m *stream.Machine, now stream.Instant) { m.EndPut(now, id) })
	for p.wait() {
		p.report()
	}
	err = p.err(ctx)
	for _, t := range list {
		if t.sum != nil {
			t.Evicted, t.EvictedBytes = evictedFor(t.sum)
		}
		switch s := t.sum; {
		case t.failed != nil:
			t.end(t.failed)
		case s == nil || together && err != nil:
		case s.Code != frame.OK:
			s.Name = t.Name
			t.end(summaryError(s))
		case t.Digest.IsZero() || s.Digest != t.Digest:
			t.end(&Error{Code: codes.DataLoss, Message: fmt.Sprintf("tensor %q: the server stored %v, the client sent %v", t.Name, s.Digest, t.Digest)})
		default:
			t.Durable = s.Durable
			t.end(nil)
		}
		if err == nil {
			t.end(&Error{Code: codes.Internal, Message: "the server ended the push without mentioning a tensor"})
		}
	}
	for _, t := range p.said {
		t.stored.Store(t.over && t.Err == nil)
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
		moved := min(t.moved.Load(), t.Bytes-1) // what was given up counts, too
		if t.stored.Load() {
			moved = t.Bytes
		}
		t.report(p.progress, moved)
	}
	p.said = slices.DeleteFunc(p.said, func(t *pushed) bool { return t.told == t.Bytes })
}

// send sends one tensor. It returns false when the call is over.
func (p *putting) send(t *pushed) bool {
	s := p.session
	id := tensor.NewID()
	var geo tensor.Geometry
	var err error
	for { // wait for a place among the tensors on their way
		room := false
		s.sess.Do(func(m *stream.Machine, now stream.Instant) {
			st := m.Status()
			most := min(max(st.PeerTensors/2, 1), pushTensors)
			if room = len(p.byID) == 0 || len(p.byID) < most && p.bytes+t.Bytes <= max(pushBytes, m.Ahead(now)); room {
				geo, err = s.geometry(m, t.Desc)
				p.byID[id] = t
				p.bytes += t.Bytes
				m.Patience(p.id, stream.Instant(s.client.cfg.StallTimeout)+stream.Instant(p.bytes/silentRate)*stream.Instant(time.Second))
				s.wantLane(m, t.Bytes)
			}
		})
		if room {
			break
		}
		p.report()
		if !p.wait() {
			return false
		}
	}
	p.rest.of(t.Name)
	f := session.Feed{Session: s.sess, View: t.view, Pieces: pushPieces, Step: p.report, Moved: func(n int64) {
		t.moved.Add(n)
		p.news.Tell()
	}}
	if t.in.Reader != nil {
		from := source{t.in.Reader, s.client, p.rest, fmt.Sprintf("tensor %q", t.Name), t.Bytes}
		f.View = from.view
	}
	if err == nil {
		t.Digest, err = f.Run(p.ctx, frame.Desc{
			Tensor: id, Desc: t.Desc.Clone(), ChunkBytes: uint32(geo.ChunkBytes), Call: p.id, Name: t.Name, Metadata: t.in.Metadata,
		})
	}
	switch {
	case err == nil || errors.Is(err, stream.ErrClosed): // or it has a Summary
		return true
	case p.ctx.Err() != nil:
		return false
	}
	if source, ok := errors.AsType[*session.SourceError](err); ok {
		err = source.Err
	} else {
		err = fmt.Errorf("%w: tensor %q: %w", ErrInput, t.Name, err)
	}
	if p.together { // before its end is sent: the server may have all that was announced
		p.stop(fmt.Errorf("nothing of the set is stored: %w", err))
		return false
	}
	s.sess.Do(func(m *stream.Machine, _ stream.Instant) {
		t.failed = err
		if !m.GiveUp(id, frame.Cancelled, "the client could not read all of it") {
			p.ended(id)
		}
	})
	return true
}

// view shares bytes [off, off+n) of Data.
func (t *pushed) view(off, n int64) ([]byte, interface{ Release() }, error) {
	t.using.Add(1)
	return t.in.Data[off : off+n : off+n], t, nil
}

// Release ends the sharing of a view.
func (t *pushed) Release() { t.using.Done() }

// ended takes a tensor out of those on their way, if it is there; the session is locked.
func (p *putting) ended(id tensor.ID) {
	if t := p.byID[id]; t != nil {
		delete(p.byID, id)
		p.bytes -= t.Bytes
		p.news.Tell()
	}
}

// event implements handler.
func (p *putting) event(_ *stream.Machine, _ stream.Instant, e stream.Event) {
	t := p.byID[e.Tensor]
	switch {
	case e.Kind == stream.EventSummary && t != nil:
		t.sum = e.Summary
		t.stored.Store(e.Summary.Code == frame.OK && !p.together)
		if e.Summary.Code == frame.OK {
			p.sent += t.Bytes
		}
		p.ended(e.Tensor)
	case e.Kind == stream.EventFailed && t != nil: // its bytes vanished
		t.failed = &Error{Code: codes.DataLoss, Message: fmt.Sprintf("tensor %q: %s", t.Name, e.Text)}
	}
}
