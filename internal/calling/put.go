package calling

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc/codes"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// put is the state of one Put.
type put struct {
	task     // its news: a tensor has ended, or moved
	rest     *restClock
	progress func(Progress)
	together bool
	said     []*Out // on their way, in order, for progress

	// Guarded by the session's lock until ctx has ended.
	byID  map[tensor.ID]*Out
	bytes int64 // of the tensors in byID
}

// Out is one tensor of a put. Its Input is shared until Release.
type Out struct {
	Tensor
	In     *Input
	using  sync.WaitGroup // views
	stored atomic.Bool
	failed error // why the input could not be read; guarded by the session's lock until the call has ended
}

// NewOut returns a tensor of a put; one that is not to be sent has ended with err.
func NewOut(in *Input, bytes int64, err error) *Out {
	t := &Out{In: in}
	t.Summary = Summary{Name: in.Name, Desc: in.Desc, Bytes: bytes, Err: err}
	t.over = err != nil
	return t
}

// Reset makes a tensor that has failed ready for another attempt.
func (t *Out) Reset() {
	t.Err, t.over, t.failed, t.sum, t.Digest = nil, false, nil, nil, codec.Digest{}
	t.moved.Store(0)
}

// Stored says that the server has turned out to have a tensor that has failed.
func (t *Out) Stored(durable bool) {
	t.Err, t.Durable = nil, durable
	t.stored.Store(true)
}

// Close waits until nothing uses the tensor's Input, and releases it.
func (t *Out) Close() {
	t.using.Wait()
	if t.In.Release != nil {
		t.In.Release()
	}
}

// Put sends the tensors that have not ended in one call, together or each by itself. An error is
// that of the call.
func (s *Session) Put(ctx context.Context, list []*Out, together bool, progress func(Progress)) error {
	id := tensor.NewID()
	p := &put{progress: progress, together: together, byID: make(map[tensor.ID]*Out)}
	if err := p.open(ctx, s, frame.Call{ID: id, Put: &frame.Put{All: together}}, p, nil); err != nil {
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
	s.Do(func(m *stream.Machine, now stream.Instant) { m.EndPut(now, id) })
	for p.wait() {
		p.report()
	}
	err := p.err(ctx)
	for _, t := range list {
		if t.sum != nil {
			t.Evicted, t.EvictedBytes = EvictedFor(t.sum)
		}
		switch s := t.sum; {
		case t.failed != nil:
			t.End(t.failed)
		case s == nil || together && err != nil:
		case s.Code != frame.OK:
			s.Name = t.Name
			t.End(SummaryError(s))
		case t.Digest.IsZero() || s.Digest != t.Digest:
			t.End(&Error{Code: codes.DataLoss, Message: fmt.Sprintf("tensor %q: the server stored %v, the client sent %v", t.Name, s.Digest, t.Digest)})
		default:
			t.Durable = s.Durable
			t.End(nil)
		}
		if err == nil {
			t.End(&Error{Code: codes.Internal, Message: "the server ended the push without mentioning a tensor"})
		}
	}
	for _, t := range p.said {
		t.stored.Store(t.over && t.Err == nil)
	}
	p.report()
	return err
}

// report tells Progress what has moved.
func (p *put) report() {
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
	p.said = slices.DeleteFunc(p.said, func(t *Out) bool { return t.told == t.Bytes })
}

// send sends one tensor. It returns false when the call is over.
func (p *put) send(t *Out) bool {
	s := p.session
	id := tensor.NewID()
	var geo tensor.Geometry
	var err error
	for { // wait for a place among the tensors on their way
		room := false
		s.Do(func(m *stream.Machine, now stream.Instant) {
			st := m.Status()
			most := max(st.PeerTensors/2, 1)
			if room = len(p.byID) == 0 || len(p.byID) < most && p.bytes+t.Bytes <= max(pushPieces*session.PieceBytes, m.Ahead(now)); room {
				geo, err = s.Lanes.Geometry(m, t.Desc)
				p.byID[id] = t
				p.bytes += t.Bytes
				m.Patience(p.id, s.patience(p.bytes))
				s.Lanes.Want(m, t.Bytes)
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
	f := session.Feed{Session: s, View: t.view, Pieces: pushPieces, Offered: func(int64) { p.report() }, Moved: func(n int64) {
		t.moved.Add(n)
		p.news.Tell()
	}}
	if t.In.Reader != nil {
		from := source{t.In.Reader, s.cfg.Pool, p.rest, fmt.Sprintf("tensor %q", t.Name), t.Bytes}
		f.View = from.view
	}
	if err == nil {
		t.Digest, err = f.Run(p.ctx, frame.Desc{
			Tensor: id, Desc: t.Desc.Clone(), ChunkBytes: uint32(geo.ChunkBytes), Call: p.id, Name: t.Name, Metadata: t.In.Metadata,
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
		err = fmt.Errorf("%w: tensor %q: %w", Causes.Input, t.Name, err)
	}
	if p.together { // before its end is sent: the server may have all that was announced
		p.Stop(fmt.Errorf("nothing of the set is stored: %w", err))
		return false
	}
	s.Do(func(m *stream.Machine, _ stream.Instant) {
		t.failed = err
		if !m.GiveUp(id, frame.Cancelled, "the client could not read all of it") {
			p.ended(id)
		}
	})
	return true
}

// view shares bytes [off, off+n) of Data.
func (t *Out) view(off, n int64) ([]byte, interface{ Release() }, error) {
	t.using.Add(1)
	return t.In.Data[off : off+n : off+n], t, nil
}

// Release ends the sharing of a view.
func (t *Out) Release() { t.using.Done() }

// ended takes a tensor out of those on their way, if it is there; the session is locked.
func (p *put) ended(id tensor.ID) {
	if t := p.byID[id]; t != nil {
		delete(p.byID, id)
		p.bytes -= t.Bytes
		p.news.Tell()
	}
}

// event implements handler.
func (p *put) event(_ *stream.Machine, _ stream.Instant, e stream.Event) {
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
