package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/glob"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// PullRequest describes a pull.
type PullRequest struct {
	Select []Selection
	// To returns the Sink of a tensor. If To is nil, or the Sink empty, the tensor gets
	// memory of its own, up to ResultBytes.
	To func(name string, d tensor.Desc) (Sink, error)
	// Progress, if not nil, is called after each chunk, on the goroutine of Pull.
	Progress func(Progress)
}

// Selection selects tensors of a server's store, or a source.
type Selection struct {
	// Name is the name of a tensor, a glob that must match at least one, or, with Source,
	// the name of a source.
	Name string
	// Source makes the server generate a tensor from Params.
	Source bool
	Params map[string]string
	// Held lists ranges that the Sink, an Into or an At, already has. They are not sent.
	// They must be in ascending order and must not overlap.
	Held []Range
	// HeldDigest is the digest of the tensor that Held is from, if known. If the server's
	// tensor has another digest, the server sends all of it.
	HeldDigest codec.Digest
}

// Range is a range of a tensor's bytes.
type Range = frame.Range

// At returns a Sink that writes each chunk of a tensor to w, at its offset, as it arrives.
// Only Pull supports it. w is also read, for the digest, if chunks arrive out of order. All
// of this happens on the goroutine of Pull.
func At(w ReadWriterAt) Sink { return Sink{at: w} }

// ReadWriterAt is implemented by *os.File, for example.
type ReadWriterAt interface {
	io.ReaderAt
	io.WriterAt
}

// Pull fetches tensors and returns their summaries in the order of the selections. The error joins
// those of the summaries, or says what ended the pull. A tensor whose summary has no error
// is complete and has the server's digest.
func (c *Client) Pull(ctx context.Context, r PullRequest) ([]Summary, error) {
	p := &pull{client: c, request: r, byID: make(map[tensor.ID]*pulled), answered: make([]bool, len(r.Select)), news: make(chan struct{}, 1), closed: make(chan struct{})}
	names := make(map[string]int, len(r.Select))
	for _, s := range r.Select {
		names[s.Name]++
		var g *glob.Glob
		if s.glob() {
			g, _ = glob.Parse(s.Name) // the server rejects an invalid one
		}
		p.globs = append(p.globs, g)
	}
	patience := stream.Instant(c.cfg.StallTimeout)
	var list []frame.Selection
	for _, s := range r.Select {
		if len(s.Held) > 0 && names[s.Name] > 1 {
			return nil, fmt.Errorf("%w: selection %q: a tensor with Held must be selected only once", ErrInput, s.Name)
		}
		sel := frame.Selection{Name: s.Name, Source: s.Source, Params: s.Params, Held: s.Held}
		for _, h := range s.Held {
			patience += stream.Instant(h.Len/silentRate) * stream.Instant(time.Second)
		}
		if !s.HeldDigest.IsZero() {
			sel.HeldDigest = s.HeldDigest[:]
		}
		list = append(list, sel)
	}
	err := p.run(ctx, list, patience)
	p.over(err)
	if err == nil {
		p.unanswered()
		err = errorsOf(p.list())
	}
	return p.list(), err
}

// pull is the state of one Pull.
type pull struct {
	client  *Client
	request PullRequest
	session *Session
	id      tensor.ID
	rest    *restClock
	order   []*pulled
	active  []*pulled // with memory lent, or to be lent

	globs     []*glob.Glob // of the selections; nil for a plain name
	answered  []bool       // by selection: the server has mentioned it
	textBytes int          // of the server's texts that are kept

	news   chan struct{} // capacity 1
	closed chan struct{} // closed by the session's last event of the call

	// Guarded by the session's lock until closed.
	byID  map[tensor.ID]*pulled
	queue []told
	done  frame.Done
	cause error // why this side ended the call
}

// told is an event for the goroutine of Pull.
type told struct {
	t   *pulled
	sum *frame.Summary // how it ended; nil: it was announced
}

// pulled is one tensor of a pull, and the Place of its bytes.
type pulled struct {
	Summary
	id      tensor.ID
	name    string // as the server says
	held    bool   // the server does not send what is held
	sel     int    // index of its selection
	moved   int64  // guarded by the session's lock
	said    int64  // of moved, to Progress
	landing session.Landing

	into   []byte
	at     ReadWriterAt
	rest   *restClock
	writer io.Writer
	order  *codec.OrderedDigester // nil once it is over
	sum    *frame.Summary         // the server's, if it says OK
	over   bool
}

// run receives what the selections pick. An error is that of the call.
func (p *pull) run(ctx context.Context, list []frame.Selection, patience stream.Instant) error {
	s, err := p.client.sharedSession(ctx)
	if err != nil {
		return err
	}
	p.id = tensor.NewID()
	if !s.stores() {
		if s, err = p.client.pullSession(ctx, s, p.id); err != nil {
			return err
		}
		defer s.Close()
		for i := range list { // that session's server does not say what it leaves out
			list[i].Held, list[i].HeldDigest = nil, nil
		}
	}
	p.session = s
	if err := s.open(ctx, frame.Call{ID: p.id, Get: &frame.Get{Selections: list}}, p); err != nil {
		return err
	}
	s.sess.Do(func(m *stream.Machine, _ stream.Instant) { m.Patience(p.id, patience) })
	p.rest = s.rests("the pull", p.stop, p.closed)
	defer p.rest.end()
	defer context.AfterFunc(ctx, func() { p.stop(context.Cause(ctx)) })()
	for p.step() {
		select {
		case <-p.news:
		case <-p.closed:
		}
	}
	return endError(ctx, &p.done, p.cause)
}

// step does what can be done without waiting. It returns false when the call is over and
// nothing is left to be done.
func (p *pull) step() bool {
	var news []told
	over := false
	p.session.sess.Do(func(*stream.Machine, stream.Instant) {
		news, p.queue = p.queue, nil
		select {
		case <-p.closed:
			over = true
		default:
		}
	})
	for _, n := range news {
		if n.sum == nil {
			p.announced(n.t)
		} else {
			p.summary(n.t, n.sum)
		}
	}
	p.active = slices.DeleteFunc(p.active, func(t *pulled) bool { return p.receive(t, over) })
	return !over || len(news) > 0 || len(p.active) > 0
}

// receive takes what has come of a tensor, and reports whether nothing is left to be done:
// once the call is over nothing more comes.
func (p *pull) receive(t *pulled, over bool) bool {
	if !t.over {
		p.rest.of(named("tensor", t.Name))
		if err := t.landing.Step(); err != nil {
			p.fail(t, err)
		}
		p.progress(t)
	}
	if !t.over && t.sum != nil && t.landing.Whole() {
		t.Durable = t.sum.Durable
		d, err := t.digest()
		if err == nil && d != t.sum.Digest {
			err = &Error{Code: codes.DataLoss, Message: fmt.Sprintf("tensor %q: its digest is %v, the server's is %v; pull it again", t.Name, d, t.sum.Digest)}
		}
		t.Digest = d
		t.end(err)
	}
	return (t.over || over) && t.landing.Home()
}

func (p *pull) progress(t *pulled) {
	var moved int64
	p.session.sess.Do(func(*stream.Machine, stream.Instant) { moved = t.moved })
	if moved > t.said && p.request.Progress != nil {
		p.request.Progress(Progress{t.Name, moved, t.Bytes})
	}
	t.said = moved
}

// event implements handler.
func (p *pull) event(m *stream.Machine, now stream.Instant, e stream.Event) {
	t := p.byID[e.Tensor]
	switch e.Kind {
	case stream.EventTensor:
		d := e.Desc
		t = &pulled{id: e.Tensor, name: d.Name, held: d.Held, order: new(codec.OrderedDigester)}
		t.Desc, t.Bytes = d.Desc.Clone(), int64(d.SizeBytes)
		t.landing = session.Landing{
			Session: p.session.sess, Tensor: e.Tensor, Geo: tensor.Geometry{Size: t.Bytes, ChunkBytes: int64(d.ChunkBytes)},
			Wake: func() { tell(p.news) }, Slab: func(n int) (*slab.Slab, error) { return p.client.pool.Get(n) }, To: t,
		}
		if d.OnAllowance {
			t.landing.Stage(m, now, make([]byte, t.Bytes))
		}
		p.byID[e.Tensor] = t
		p.queue = append(p.queue, told{t: t})
		p.session.wantLane(m, t.Bytes)
	case stream.EventChunk:
		if t != nil { // its Summary may have come before
			t.moved += e.N
		}
	case stream.EventSummary:
		if t == nil {
			t = &pulled{id: e.Tensor, name: e.Summary.Name}
			p.byID[e.Tensor] = t
		}
		p.queue = append(p.queue, told{t, e.Summary})
	case stream.EventFailed:
		sum := &frame.Summary{Tensor: e.Tensor, Code: e.Code, Message: e.Text}
		if t == nil {
			t = &pulled{id: e.Tensor, name: e.Desc.Name}
			p.queue = append(p.queue, told{t: t})
		}
		p.queue = append(p.queue, told{t, sum})
	case stream.EventStop:
		if p.cause == nil {
			p.cause = p.client.stalled(e)
		}
	case stream.EventClosed:
		p.done = *e.Done
		close(p.closed)
	}
	tell(p.news)
}

// stop cancels the call with a cause on this side.
func (p *pull) stop(cause error) {
	p.session.sess.Do(func(m *stream.Machine, _ stream.Instant) { p.session.stop(m, p.id, &p.cause, cause) })
}

// announced begins to receive a tensor.
func (p *pull) announced(t *pulled) {
	if !p.add(t) || t.landing.Session == nil {
		return
	}
	p.active = append(p.active, t)
	if err := p.open(t); err != nil {
		p.fail(t, err)
	}
}

// add adds a tensor. It drops a name that was not selected: the server could send anything.
func (p *pull) add(t *pulled) bool {
	if most := p.most(); len(p.order) >= most {
		p.stop(&Error{Code: codes.ResourceExhausted, Message: fmt.Sprintf("the server reported more than %d tensors, the limit of this pull; use several pulls", most)})
		return false
	}
	if t.Transfer, t.sel = p.id, p.selected(t.name); t.sel >= 0 {
		t.Name = t.name
	}
	p.order = append(p.order, t)
	return true
}

// fail gives up a tensor for a reason of this side's.
func (p *pull) fail(t *pulled, err error) {
	if se, ok := errors.AsType[*frame.Error](err); ok {
		err = &Error{Code: codes.Code(se.Code), Message: fmt.Sprintf("tensor %q: %s", t.Name, se.Text)}
	}
	t.end(err)
	p.session.sess.Do(func(m *stream.Machine, _ stream.Instant) {
		m.FailTensor(t.id, frame.FailedPrecondition, "the client cannot take the tensor")
	})
}

// WriteViews writes a chunk to the tensor's destination.
func (t *pulled) WriteViews(off int64, views [][]byte) error {
	if next := t.order.Next(); t.writer != nil && off != next {
		return frame.Errorf(frame.FailedPrecondition, "byte %d arrived instead of byte %d, but the tensor goes to a writer; use Into or At", off, next)
	}
	if t.into != nil {
		for _, v := range views {
			if &v[0] != &t.into[off] { // otherwise it was received there
				copy(t.into[off:], v)
			}
			t.order.Wrote(off, v)
			off += int64(len(v))
		}
		return nil
	}
	to := t.writer
	if t.at != nil {
		to = io.NewOffsetWriter(t.at, off)
	}
	for _, v := range views {
		t.order.Wrote(off, v)
		off += int64(len(v))
		t.rest.start()
		_, err := to.Write(v)
		t.rest.stop()
		if err != nil {
			return err
		}
	}
	return nil
}

// digest returns the digest of the whole tensor. It reads back what did not arrive in
// order.
func (t *pulled) digest() (codec.Digest, error) {
	switch next := t.order.Next(); {
	case t.at != nil:
		if err := t.order.ReadRest(t.at, t.Bytes); err != nil {
			return codec.Digest{}, err
		}
	case t.into != nil:
		t.order.Wrote(next, t.into[next:])
	}
	return t.order.Sum(), nil
}

// open asks the caller where a tensor goes.
func (p *pull) open(t *pulled) error {
	if t.Name == "" {
		return &Error{Code: codes.Internal, Message: fmt.Sprintf("tensor %v: the server sent a tensor that was not selected", t.id)}
	}
	p.rest.of(named("tensor", t.Name))
	t.rest = p.rest
	var sink Sink
	var err error
	p.rest.start()
	if p.request.To != nil {
		sink, err = p.request.To(t.Name, t.Desc.Clone())
	}
	if err == nil && sink.open != nil {
		t.writer, err = sink.open(t.Desc.Clone())
	}
	p.rest.stop()
	switch {
	case err != nil:
		return err
	case t.writer != nil:
		t.landing.InOrder = true
	case sink.at != nil:
		t.at = sink.at
	case sink.into != nil:
		if int64(len(sink.into)) != t.Bytes {
			return fmt.Errorf("%w: tensor %q has %d bytes, its buffer has %d", ErrInput, t.Name, t.Bytes, len(sink.into))
		}
		t.into = sink.into
	case t.Bytes > p.client.cfg.ResultBytes:
		return fmt.Errorf("%w: tensor %q has %d bytes, more than ResultBytes (%d); raise it, or use Into, Writer or At", ErrInput, t.Name, t.Bytes, p.client.cfg.ResultBytes)
	default:
		t.Data = make([]byte, t.Bytes)
		t.into = t.Data
	}
	t.landing.Memory = t.into
	if t.held {
		t.landing.Held = p.held(t.Name)
	}
	return nil
}

// selected returns the index of a selection that matches name, or -1: the first unanswered
// one, which is marked as answered. The server processes selections in order.
func (p *pull) selected(name string) (found int) {
	if found = -1; len(name) > frame.NameBytes {
		return found
	}
	for i := range p.request.Select {
		if p.request.Select[i].Name == name || p.globs[i] != nil && p.globs[i].Match(name) {
			found = i
			if !p.answered[i] {
				p.answered[i] = true
				break
			}
		}
	}
	return found
}

// glob reports whether s may match several tensors.
func (s Selection) glob() bool { return !s.Source && strings.ContainsAny(s.Name, "*?[") }

// most is how many tensors the server may report.
func (p *pull) most() int {
	if slices.ContainsFunc(p.request.Select, Selection.glob) {
		return pullTensors
	}
	return len(p.request.Select)
}

func (t *pulled) end(err error) {
	if !t.over {
		t.over, t.Err = true, err
		t.into, t.at, t.writer, t.order = nil, nil, nil, nil // there may be pullTensors of them
		t.landing.Memory, t.landing.To = nil, nil
		if err != nil {
			t.Data = nil
		}
	}
}

// summary records how the server ended a tensor.
func (p *pull) summary(t *pulled, s *frame.Summary) {
	s.Message = p.kept(s.Message)
	if t.landing.Session == nil && t.Transfer.IsZero() && !p.add(t) { // a selection that matched nothing
		return
	}
	switch s.Name = t.Name; {
	case t.sum != nil: // it has one
	case s.Code != frame.OK:
		t.end(summaryError(s))
	case t.landing.Session == nil:
		t.end(&Error{Code: codes.Internal, Message: fmt.Sprintf("tensor %q: the server claims to have sent it, but did not", s.Name)})
	default:
		t.sum = s
	}
}

// kept copies as much of the server's text as the limits allow.
func (p *pull) kept(text string) string {
	text = frame.Clip(text, min(frame.TextBytes, pullTextBytes-p.textBytes))
	p.textBytes += len(text)
	return text
}

// held returns the ranges of a tensor that the caller has.
func (p *pull) held(name string) []Range {
	if i := slices.IndexFunc(p.request.Select, func(s Selection) bool { return s.Name == name }); i >= 0 {
		return p.request.Select[i].Held
	}
	return nil
}

// over ends the tensors that are still open.
func (p *pull) over(err error) {
	if err == nil {
		err = &Error{Code: codes.Internal, Message: "the server ended the pull without a summary"}
	}
	for _, t := range p.order {
		t.end(err)
	}
}

// unanswered adds a failure for each selection that the server did not mention before its
// OK.
func (p *pull) unanswered() {
	for i, s := range p.request.Select {
		if !p.answered[i] {
			err := &Error{Code: codes.DataLoss, Message: fmt.Sprintf("tensor %q: the server ended the pull without mentioning it; pull it again", s.Name)}
			p.order = append(p.order, &pulled{sel: i, Summary: Summary{Name: s.Name, Transfer: p.id, Err: err}})
		}
	}
}

func (p *pull) list() []Summary {
	slices.SortStableFunc(p.order, func(a, b *pulled) int { return cmp.Compare(a.sel, b.sel) })
	out := make([]Summary, len(p.order))
	for i, t := range p.order {
		out[i] = t.Summary
	}
	return out
}
