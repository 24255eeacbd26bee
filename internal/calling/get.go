package calling

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"

	"google.golang.org/grpc/codes"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/glob"
	"github.com/tensorferry/tensorferry/internal/session"
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
	Held []frame.Range
	// HeldDigest is the digest of the tensor that Held is from, if known. If the server's
	// tensor has another digest, the server sends all of it.
	HeldDigest codec.Digest
}

// IsGlob reports whether a selection may select any number of tensors.
func (s *Selection) IsGlob() bool { return !s.Source && strings.ContainsAny(s.Name, "*?[") }

// Get fetches what the request selects. Without an error, each tensor has its own. damaged: the
// server was told of a tensor that has not the server's digest.
func (s *Session) Get(ctx context.Context, r PullRequest) (list []*In, damaged bool, err error) {
	p := &get{request: r, most: len(r.Select), byID: make(map[tensor.ID]*In), answered: make([]bool, len(r.Select))}
	names := make(map[string]int, len(r.Select))
	for _, s := range r.Select {
		names[s.Name]++
		var g *glob.Glob
		if s.IsGlob() {
			g, _ = glob.Parse(s.Name) // the server rejects an invalid one
			p.most = pullTensors
		}
		p.globs = append(p.globs, g)
	}
	var held int64
	var picks []frame.Selection
	for _, s := range r.Select {
		if len(s.Held) > 0 && names[s.Name] > 1 {
			return nil, false, fmt.Errorf("%w: selection %q: a tensor with Held must be selected only once", Causes.Input, s.Name)
		}
		sel := frame.Selection{Name: s.Name, Source: s.Source, Params: s.Params, Held: s.Held}
		for _, h := range s.Held {
			held += h.Len
		}
		if !s.HeldDigest.IsZero() {
			sel.HeldDigest = s.HeldDigest[:]
		}
		picks = append(picks, sel)
	}
	err = p.run(ctx, s, picks, s.patience(held))
	left := err // why a tensor that has not ended did not arrive
	if err == nil {
		left = &Error{Code: codes.Internal, Message: "the server ended the pull without a summary"}
		for i, s := range r.Select {
			if !p.answered[i] {
				t := &In{Sel: i}
				t.Name, t.Transfer = s.Name, p.id
				t.End(&Error{Code: codes.DataLoss, Message: fmt.Sprintf("tensor %q: the server ended the pull without mentioning it; pull it again", s.Name)})
				p.order = append(p.order, t)
			}
		}
	}
	slices.SortStableFunc(p.order, func(a, b *In) int { return cmp.Or(cmp.Compare(a.Sel, b.Sel), cmp.Compare(a.Name, b.Name)) })
	for _, t := range p.order {
		t.End(left)
	}
	return p.order, p.told, err
}

// get is the state of one Get.
type get struct {
	task
	request PullRequest
	rest    *restClock
	order   []*In // as the server mentioned them
	active  int   // of those, that have not ended, or have memory lent
	ended   bool  // nothing more comes
	seen    []*In // queue, to be used again

	accepted []tensor.ID // they have the server's digest, which the server is to be told
	told     bool        // the server was told of a tensor that has another

	metadata int          // bytes of the tensors'
	globs    []*glob.Glob // of the selections; nil for a plain name
	answered []bool       // by selection: the server has mentioned it
	most     int          // how many tensors the server may report

	// Guarded by the session's lock until ctx has ended.
	byID      map[tensor.ID]*In
	queue     []*In // of which there is news
	textBytes int   // of the server's texts that are kept
}

// In is one tensor of a get.
type In struct {
	Tensor
	place               // zero once it is over
	handed  atomic.Bool // to a Writer, which cannot take it twice
	held    bool        // the server does not send what is held
	Sel     int         // index of its selection; -1 if it has none
	landing session.Landing
	queued  bool           // in queue; guarded as it is
	known   bool           // in order, or beyond the limit
	active  bool           // counts in pull.active
	outcome *frame.Summary // sum, as of the last news
}

// Handed reports whether a Writer has some of the tensor, which it cannot take twice.
func (t *In) Handed() bool { return t.handed.Load() }

// run receives what the selections pick. An error is that of the call.
func (p *get) run(ctx context.Context, s *Session, picks []frame.Selection, patience stream.Instant) error {
	id := tensor.NewID()
	if err := p.open(ctx, s, frame.Call{ID: id, Get: &frame.Get{Selections: picks}}, p, nil); err != nil {
		return err
	}
	s.Do(func(m *stream.Machine, _ stream.Instant) { m.Patience(id, patience) })
	defer p.unhook()
	p.rest = p.rests("pull", "")
	defer p.rest.end()
	for p.step() {
		p.wait()
	}
	return p.err(ctx)
}

// step does what can be done without waiting. It returns false when the call is over and
// nothing is left to be done.
func (p *get) step() bool {
	var news []*In
	over := false
	p.session.Do(func(*stream.Machine, stream.Instant) {
		news, p.queue = p.queue, p.seen[:0]
		for _, t := range news {
			t.queued, t.outcome = false, t.sum
		}
		over = p.ctx.Err() != nil
	})
	p.seen = news
	for _, t := range news {
		if !t.known {
			p.add(t)
		}
	}
	if over && !p.ended {
		p.ended, news = true, p.order
	}
	for _, t := range news {
		if t.active && p.receive(t) {
			t.active = false
			p.active--
		}
	}
	clear(p.seen)
	if len(p.accepted) > 0 {
		p.session.Do(func(m *stream.Machine, now stream.Instant) {
			for _, id := range p.accepted {
				m.Accept(now, id)
			}
		})
		p.accepted = p.accepted[:0]
	}
	return !over || p.active > 0
}

// receive takes what has come of a tensor, and reports whether nothing is left to be done:
// once the call is over nothing more comes.
func (p *get) receive(t *In) bool {
	sum := t.outcome
	switch {
	case t.over:
	case sum != nil && sum.Code != frame.OK:
		sum.Name = t.Name
		t.End(SummaryError(sum))
	case t.landing.Session == nil:
		t.End(&Error{Code: codes.Internal, Message: fmt.Sprintf("tensor %q: the server claims to have sent it, but did not", t.Name)})
	default:
		p.rest.of(t.Name)
		if err := t.landing.Step(); err != nil {
			p.fail(t, err)
		}
		t.report(p.request.Progress, t.moved.Load())
	}
	if !t.over && sum != nil && t.landing.Whole() {
		t.Durable = sum.Durable
		p.rest.start() // it may be read back from a slow disk
		d, err := t.digest()
		p.rest.stop()
		t.Digest = d
		switch {
		case err != nil:
			p.fail(t, err)
		case d != sum.Digest:
			p.fail(t, frame.Errorf(frame.DataLoss, "its digest is %v, the server's is %v; pull it again", d, sum.Digest))
		default:
			t.End(nil)
			p.accepted = append(p.accepted, t.landing.Tensor)
		}
	}
	return (t.over || p.ended) && (t.landing.Session == nil || t.landing.Home())
}

// event implements handler.
func (p *get) event(m *stream.Machine, now stream.Instant, e stream.Event) {
	t := p.byID[e.Tensor]
	if ends := e.Kind == stream.EventSummary || e.Kind == stream.EventFailed; e.Kind == stream.EventTensor || t == nil && ends {
		if len(p.byID) > p.most { // add ends the pull, once the caller's code lets it
			return
		}
		t = new(In)
		if e.Desc != nil {
			t.Name = e.Desc.Name
		} else if e.Summary != nil { // of a selection that matched nothing
			t.Name = frame.Clip(e.Summary.Name, frame.NameBytes+1) // none is as long
		}
		p.byID[e.Tensor] = t
	}
	switch e.Kind {
	case stream.EventTensor:
		d := e.Desc
		t.held, t.Desc, t.Bytes, t.Metadata = d.Held, d.Desc.Clone(), int64(d.SizeBytes), maps.Clone(d.Metadata)
		t.place = place{size: t.Bytes, order: new(codec.OrderedDigester)}
		t.landing = session.Landing{
			Session: p.session, Tensor: e.Tensor, Geo: tensor.Geometry{Size: t.Bytes, ChunkBytes: int64(d.ChunkBytes)},
			Tell: func() { p.tell(t) }, Slab: p.session.cfg.Pool.Get, To: t,
		}
		if d.OnAllowance {
			p.session.stage(m, now, &t.landing)
		}
		p.session.Lanes.Want(m, t.Bytes)
	case stream.EventChunk:
		t.moved.Add(e.N) // it has memory, so it is there
	case stream.EventSummary, stream.EventFailed:
		if t.sum != nil { // the first counts
			break
		}
		t.sum = cmp.Or(e.Summary, &frame.Summary{Code: e.Code, Message: e.Text, Reason: e.Reason})
		t.sum.Message = frame.Clip(t.sum.Message, min(frame.TextBytes, pullTextBytes-p.textBytes))
		p.textBytes += len(t.sum.Message)
		if t.sum.Code == frame.OK {
			p.received += t.Bytes
		}
	}
	if t != nil {
		p.tell(t)
	}
}

// tell has step look at a tensor; the session is locked.
func (p *get) tell(t *In) {
	if !t.queued {
		t.queued = true
		p.queue = append(p.queue, t)
	}
	p.news.Tell()
}

// add adds a tensor, and begins to receive it. It drops a name that was not selected: the
// server could send anything.
func (p *get) add(t *In) {
	t.known, t.active = true, true
	p.active++
	if len(p.order) >= p.most {
		t.End(nil) // but for its memory
		p.Stop(&Error{Code: codes.ResourceExhausted, Message: fmt.Sprintf("the server reported more than %d tensors, the limit of this pull; use several pulls", p.most)})
		return
	}
	if t.Transfer, t.Sel = p.id, p.selected(t.Name); t.Sel < 0 {
		t.Name = ""
	}
	p.order = append(p.order, t)
	if p.metadata += new(frame.Sizes).OfEntries(t.Metadata); p.metadata > ListBytes {
		t.End(nil)
		p.Stop(&Error{Code: codes.ResourceExhausted, Message: fmt.Sprintf("the metadata of the tensors is longer than %d bytes; use several pulls", ListBytes)})
		return
	}
	if t.landing.Session != nil {
		if err := p.place(t); err != nil {
			p.fail(t, err)
		}
	}
}

// fail gives up a tensor for a reason of this side's. The server is told what is wrong with
// its tensor, not what is wrong here.
func (p *get) fail(t *In, err error) {
	code, text := frame.FailedPrecondition, "the client cannot take the tensor"
	if se, ok := errors.AsType[*frame.Error](err); ok {
		if err = (&Error{Code: codes.Code(se.Code), Reason: se.Reason, Message: fmt.Sprintf("tensor %q: %s", t.Name, se.Text)}); se.Code == frame.DataLoss && !t.held {
			code, text, p.told = se.Code, se.Text, true
		}
	}
	t.End(err)
	p.session.Do(func(m *stream.Machine, _ stream.Instant) {
		m.FailTensor(t.landing.Tensor, code, text)
	})
}

// place asks the caller where a tensor goes.
func (p *get) place(t *In) error {
	if t.Name == "" {
		return &Error{Code: codes.Internal, Message: fmt.Sprintf("tensor %v: the server sent a tensor that was not selected", t.landing.Tensor)}
	}
	p.rest.of(t.Name)
	t.rest = p.rest
	if i := slices.IndexFunc(p.request.Select, func(s Selection) bool { return s.Name == t.Name }); t.held && i >= 0 {
		t.landing.Held = p.request.Select[i].Held
	}
	var sink Sink
	var err error
	if p.request.To != nil {
		p.rest.start()
		sink, err = p.request.To(t.Name, t.Desc.Clone())
		p.rest.stop()
	}
	switch {
	case err != nil:
	case sink.open != nil && t.held:
		err = fmt.Errorf("%w: tensor %q: a Writer has nothing of it; use Held with Into or At", Causes.Input, t.Name)
	case sink.open != nil:
		t.landing.InOrder, t.place.handed = true, &t.handed
		err = t.open(sink, t.Desc.Clone())
	case sink.at != nil:
		t.at = sink.at
	default:
		if t.into, err = sink.memory(t.Desc, t.Bytes, p.session.cfg.ResultBytes); err != nil {
			err = fmt.Errorf("%w: tensor %q: %w", Causes.Input, t.Name, err)
		} else if sink.into == nil {
			t.Data = t.into
		}
		t.landing.Memory = t.into
	}
	return err
}

// selected returns the index of a selection that matches name, or -1: the first unanswered
// one, which is marked as answered. The server processes selections in order.
func (p *get) selected(name string) (found int) {
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

// End records the outcome of the tensor: the first counts.
func (t *In) End(err error) {
	if !t.over {
		t.place = place{} // there may be pullTensors of them
		t.landing.Memory, t.landing.To = nil, nil
		if err != nil {
			t.Data = nil
		}
	}
	t.Tensor.End(err)
}
