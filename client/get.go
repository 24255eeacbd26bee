package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
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

func (s *Selection) isGlob() bool { return !s.Source && strings.ContainsAny(s.Name, "*?[") }

// Range is a range of a tensor's bytes.
type Range = frame.Range

// Pull fetches tensors and returns their summaries in the order of the selections, those of a
// glob by name. The error joins those of the summaries, or says what ended the pull. A tensor
// whose summary has no error is complete and has the server's digest. The tensors of up to 1 024
// selections are of one state of the store with regard to sets; more are pulled one part after
// the other.
func (c *Client) Pull(ctx context.Context, r PullRequest) ([]Summary, error) {
	c.tally.calls.Add(1)
	var got []Summary
	for left := r.Select; ; {
		r.Select = left[:min(len(left), requestNames)]
		some, err := c.pullPart(ctx, r)
		got = append(got, some...)
		if left = left[len(r.Select):]; err != nil || len(left) == 0 {
			return got, cmp.Or(err, errorsOf(got))
		}
	}
}

// pullPart is Pull for as many selections as a request has. The error is what ended the pull.
func (c *Client) pullPart(ctx context.Context, r PullRequest) ([]Summary, error) {
	left := make([]int, len(r.Select)) // selections
	for i := range left {
		left[i] = i
	}
	bySelection := make([][]*pulled, len(r.Select)+1) // the last are of none
	for tries := c.tries(); ; c.tally.retries.Add(1) {
		q := r
		q.Select = make([]Selection, len(left))
		for i, s := range left {
			q.Select[i] = r.Select[s]
			bySelection[s] = nil
		}
		order, err := c.pull(ctx, q)
		for _, t := range order {
			of := len(r.Select)
			if t.sel >= 0 {
				of = left[t.sel]
			}
			bySelection[of] = append(bySelection[of], t)
		}
		why := err
		left = slices.DeleteFunc(left, func(s int) bool {
			failed := err
			if len(bySelection[s]) > 0 && !r.Select[s].isGlob() {
				failed = nil
			}
			for _, t := range bySelection[s] {
				if t.handed.Load() {
					return true
				}
				failed = cmp.Or(failed, t.Err)
			}
			if retryable(failed) {
				why = failed
			}
			return !retryable(failed)
		})
		if len(left) > 0 && tries.again(ctx, why, true) {
			continue
		}
		var out []Summary
		for _, list := range append(bySelection[len(r.Select):], bySelection[:len(r.Select)]...) {
			for _, t := range list {
				out = append(out, t.Summary)
			}
		}
		return out, err
	}
}

// pull makes one attempt at a pull. Without an error, each tensor has its own.
func (c *Client) pull(ctx context.Context, r PullRequest) ([]*pulled, error) {
	p := &pull{request: r, most: len(r.Select), byID: make(map[tensor.ID]*pulled), answered: make([]bool, len(r.Select))}
	names := make(map[string]int, len(r.Select))
	for _, s := range r.Select {
		names[s.Name]++
		var g *glob.Glob
		if s.isGlob() {
			g, _ = glob.Parse(s.Name) // the server rejects an invalid one
			p.most = pullTensors
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
	err := p.run(ctx, c, list, patience)
	if p.told {
		p.heard(ctx, c)
	}
	left := err // why a tensor that has not ended did not arrive
	if err == nil {
		left = &Error{Code: codes.Internal, Message: "the server ended the pull without a summary"}
		for i, s := range r.Select {
			if !p.answered[i] {
				t := &pulled{sel: i}
				t.Name, t.Transfer = s.Name, p.id
				t.end(&Error{Code: codes.DataLoss, Message: fmt.Sprintf("tensor %q: the server ended the pull without mentioning it; pull it again", s.Name)})
				p.order = append(p.order, t)
			}
		}
	}
	slices.SortStableFunc(p.order, func(a, b *pulled) int { return cmp.Or(cmp.Compare(a.sel, b.sel), cmp.Compare(a.Name, b.Name)) })
	for _, t := range p.order {
		t.end(left)
	}
	return p.order, err
}

// pull is the state of one Pull.
type pull struct {
	task
	request PullRequest
	rest    *restClock
	order   []*pulled // as the server mentioned them
	active  int       // of those, that have not ended, or have memory lent
	ended   bool      // nothing more comes
	seen    []*pulled // queue, to be used again

	accepted []tensor.ID // they have the server's digest, which the server is to be told
	told     bool        // the server was told of a tensor that has another

	metadata int          // bytes of the tensors'
	globs    []*glob.Glob // of the selections; nil for a plain name
	answered []bool       // by selection: the server has mentioned it
	most     int          // how many tensors the server may report

	// Guarded by the session's lock until ctx has ended.
	byID      map[tensor.ID]*pulled
	queue     []*pulled // of which there is news
	textBytes int       // of the server's texts that are kept
}

// pulled is one tensor of a pull.
type pulled struct {
	transferred
	place               // zero once it is over
	handed  atomic.Bool // to a Writer, which cannot take it twice
	held    bool        // the server does not send what is held
	sel     int         // index of its selection
	landing session.Landing
	queued  bool           // in queue; guarded as it is
	known   bool           // in order, or beyond the limit
	active  bool           // counts in pull.active
	outcome *frame.Summary // sum, as of the last news
}

// run receives what the selections pick. An error is that of the call.
func (p *pull) run(ctx context.Context, c *Client, list []frame.Selection, patience stream.Instant) error {
	s, err := c.storingSession(ctx)
	if err != nil {
		return err
	}
	id := tensor.NewID()
	err = p.open(ctx, s, frame.Call{ID: id, Get: &frame.Get{Selections: list}}, p, func(m *stream.Machine, _ stream.Instant) error {
		m.Patience(id, patience)
		return nil
	})
	if err != nil {
		return err
	}
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
func (p *pull) step() bool {
	var news []*pulled
	over := false
	p.session.sess.Do(func(*stream.Machine, stream.Instant) {
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
		p.session.sess.Do(func(m *stream.Machine, now stream.Instant) {
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
func (p *pull) receive(t *pulled) bool {
	sum := t.outcome
	switch {
	case t.over:
	case sum != nil && sum.Code != frame.OK:
		sum.Name = t.Name
		t.end(summaryError(sum))
	case t.landing.Session == nil:
		t.end(&Error{Code: codes.Internal, Message: fmt.Sprintf("tensor %q: the server claims to have sent it, but did not", t.Name)})
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
			t.end(nil)
			p.accepted = append(p.accepted, t.landing.Tensor)
		}
	}
	return (t.over || p.ended) && (t.landing.Session == nil || t.landing.Home())
}

// event implements handler.
func (p *pull) event(m *stream.Machine, now stream.Instant, e stream.Event) {
	t := p.byID[e.Tensor]
	if ends := e.Kind == stream.EventSummary || e.Kind == stream.EventFailed; e.Kind == stream.EventTensor || t == nil && ends {
		if len(p.byID) > p.most { // add ends the pull, once the caller's code lets it
			return
		}
		t = new(pulled)
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
			Session: p.session.sess, Tensor: e.Tensor, Geo: tensor.Geometry{Size: t.Bytes, ChunkBytes: int64(d.ChunkBytes)},
			Tell: func() { p.tell(t) }, Slab: p.session.client.pool.Get, To: t,
		}
		if d.OnAllowance {
			p.session.stage(m, now, &t.landing)
		}
		p.session.wantLane(m, t.Bytes)
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
func (p *pull) tell(t *pulled) {
	if !t.queued {
		t.queued = true
		p.queue = append(p.queue, t)
	}
	p.news.Tell()
}

// add adds a tensor, and begins to receive it. It drops a name that was not selected: the
// server could send anything.
func (p *pull) add(t *pulled) {
	t.known, t.active = true, true
	p.active++
	if len(p.order) >= p.most {
		t.end(nil) // but for its memory
		p.stop(&Error{Code: codes.ResourceExhausted, Message: fmt.Sprintf("the server reported more than %d tensors, the limit of this pull; use several pulls", p.most)})
		return
	}
	if t.Transfer, t.sel = p.id, p.selected(t.Name); t.sel < 0 {
		t.Name = ""
	}
	p.order = append(p.order, t)
	if p.metadata += new(frame.Sizes).OfEntries(t.Metadata); p.metadata > listBytes {
		t.end(nil)
		p.stop(&Error{Code: codes.ResourceExhausted, Message: fmt.Sprintf("the metadata of the tensors is longer than %d bytes; use several pulls", listBytes)})
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
func (p *pull) fail(t *pulled, err error) {
	code, text := frame.FailedPrecondition, "the client cannot take the tensor"
	if se, ok := errors.AsType[*frame.Error](err); ok {
		if err = (&Error{Code: codes.Code(se.Code), Reason: se.Reason, Message: fmt.Sprintf("tensor %q: %s", t.Name, se.Text)}); se.Code == frame.DataLoss && !t.held {
			code, text, p.told = se.Code, se.Text, true
		}
	}
	t.end(err)
	p.session.sess.Do(func(m *stream.Machine, _ stream.Instant) {
		m.FailTensor(t.landing.Tensor, code, text)
	})
}

// heard waits, for tellWait at most, until the server knows of a damaged tensor: nothing answers
// a failure, and the end of the session could overtake it.
func (p *pull) heard(ctx context.Context, c *Client) {
	ctx, cancel := context.WithTimeout(ctx, tellWait)
	defer cancel()
	for ctx.Err() == nil {
		t, err := c.Transfer(ctx, p.id)
		if err != nil || slices.ContainsFunc(t.Tensors, func(s TensorState) bool { return codeOf(s.Err) == codes.DataLoss }) {
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(tellWait / 100):
		}
	}
}

// place asks the caller where a tensor goes.
func (p *pull) place(t *pulled) error {
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
		err = fmt.Errorf("%w: tensor %q: a Writer has nothing of it; use Held with Into or At", ErrInput, t.Name)
	case sink.open != nil:
		t.landing.InOrder, t.place.handed = true, &t.handed
		err = t.open(sink, t.Desc.Clone())
	case sink.at != nil:
		t.at = sink.at
	default:
		if t.into, err = sink.memory(p.session.client, t.Desc, t.Bytes); err != nil {
			err = fmt.Errorf("%w: tensor %q: %w", ErrInput, t.Name, err)
		} else if sink.into == nil {
			t.Data = t.into
		}
		t.landing.Memory = t.into
	}
	return err
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

// end records the outcome of the tensor: the first counts.
func (t *pulled) end(err error) {
	if !t.over {
		t.place = place{} // there may be pullTensors of them
		t.landing.Memory, t.landing.To = nil, nil
		if err != nil {
			t.Data = nil
		}
	}
	t.transferred.end(err)
}
