package stream

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

// The puts and gets of a world. Each tensor of them ends once for the client, by itself:
// well and bit-exact on the side that got it, or with a code, if something was done to it;
// the others of its call do not notice.

// kinds of calls.
const (
	run = iota
	put
	get
)

// tensors are the sources of a put or a get.
func (c *worldCall) tensors() []*source {
	if c.kind == put {
		return c.inputs
	}
	return c.outs
}

func (c *worldCall) tensor(id tensor.ID) *source {
	for _, s := range c.tensors() {
		if s.id == id {
			return s
		}
	}
	return nil
}

// blame says why a tensor, and its call unless that is a put or a get, may end badly.
func (w *world) blame(id tensor.ID, why string) {
	c, s := w.owner(id)
	if c.kind == run {
		c.blame(why)
	} else if s.blamed == "" {
		s.blamed = why
	}
}

// openStored has the client open a put or a get.
func (w *world) openStored(kind int) {
	c := &worldCall{id: w.id('c'), kind: kind, sums: map[tensor.ID]frame.Code{}}
	part := frame.Call{ID: c.id}
	if kind == put {
		part.Put = &frame.Put{All: w.choose(2) == 1}
	} else {
		part.Get = &frame.Get{}
		for range w.choose(3) {
			s := frame.Selection{Name: "x"}
			if w.choose(3) == 1 { // some of them in several parts
				s.Held = make([]frame.Range, 200*(1+w.choose(8)))
			}
			part.Get.Selections = append(part.Get.Selections, s)
		}
		c.selected = len(part.Get.Selections)
	}
	w.tracef("client opens %v of kind %d", c.id, kind)
	err := w.cli.m.OpenCall(w.now, part)
	if w.cli.m.Status().Draining {
		if !errors.Is(err, ErrDraining) {
			w.failf("opening while draining: %v", err)
		}
		return
	} else if err != nil {
		w.failf("opening: %v", err)
	}
	if w.srv.m.Status().Draining {
		c.blame("drain")
	}
	w.calls[c.id] = c
	w.order = append(w.order, c)
	if kind == put {
		for range w.choose(7) {
			c.inputs = append(c.inputs, w.storedSource(w.cli, c))
		}
	}
	w.cli.events()
}

func (w *world) storedSource(p *party, c *worldCall) *source {
	s := &source{id: w.id('p'), call: c, chunk: int64(1 + w.choose(int(p.m.Status().PeerChunkBytes)))}
	s.data = w.content(s.id, int64(w.choose(w.most())))
	if w.choose(3) == 1 {
		s.retain = uint32(1 + w.choose(4))
	}
	if c.kind == get && len(s.data) > 0 && w.choose(3) == 1 { // the client has some chunks
		n := uint32((int64(len(s.data)) + s.chunk - 1) / s.chunk)
		for i := uint32(0); i < n; {
			lo := i + uint32(w.choose(int(n-i)))
			hi := lo + 1 + uint32(w.choose(int(n-lo)))
			s.held = append(s.held, chunks{lo, hi})
			if i = hi + 1; w.choose(2) == 0 {
				break
			}
		}
	}
	if len(s.held) == 0 {
		w.cut(s)
		return s
	}
	at := int64(0)
	for _, h := range append(s.held, chunks{n32(s), n32(s)}) { // what lies between goes in order
		for end := min(int64(h.lo)*s.chunk, int64(len(s.data))); at < end; at += s.chunk {
			s.pieces = append(s.pieces, span{at, min(s.chunk, end-at)})
		}
		at = int64(h.hi) * s.chunk
	}
	return s
}

func n32(s *source) uint32 { return uint32((int64(len(s.data)) + s.chunk - 1) / s.chunk) }

// chunks are those of a tensor that the client has.
type chunks struct{ lo, hi uint32 }

// holds returns up to where the client has the tensor from off on, or from where it has it.
func (s *source) holds(off int64) (has bool, until int64) {
	size := int64(len(s.data))
	for _, h := range s.held {
		lo, hi := int64(h.lo)*s.chunk, min(int64(h.hi)*s.chunk, size)
		switch {
		case off < lo:
			return false, lo
		case off < hi:
			return true, hi
		}
	}
	return false, size
}

// workStored has a side's program do one thing for a put or a get.
func (p *party) workStored(c *worldCall) bool {
	sends := (c.kind == put) != p.server()
	switch {
	case slices.ContainsFunc(c.sinks[p.side()], p.lend):
		return true
	case p.server() && (c.ready == 0 || c.finished):
		return false
	case !p.server() && c.kind == get && p.check(c):
		return true
	case sends && p.feedStored(c):
		return true
	case p.server() && p.sumStored(c):
		return true
	case !p.server() && c.kind == put && !c.told:
		c.told = true
		p.m.EndPut(p.w.now, c.id)
		return true
	}
	return false
}

// check (client) accepts a tensor of a get, or finds that its digest is another.
func (p *party) check(c *worldCall) bool {
	for _, t := range c.sinks[0] {
		code, summed := c.sums[t.id]
		if !t.whole || t.failed || t.checked || !summed || code != frame.OK {
			continue
		}
		t.checked = true
		if s := c.tensor(t.id); p.w.choose(8) == 7 {
			p.w.blame(t.id, "rot")
			s.rotten = true
			p.m.FailTensor(t.id, frame.DataLoss, "another digest")
		} else {
			p.m.Accept(p.w.now, t.id)
		}
		return true
	}
	return false
}

// feedStored announces and offers.
func (p *party) feedStored(c *worldCall) bool {
	for _, s := range c.tensors() {
		if s.summed || s.failed {
			continue
		}
		if !s.open {
			s.open = true
			err := p.m.OpenTensor(p.w.now, frame.Desc{
				Tensor: s.id, Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{int64(len(s.data))}},
				ChunkBytes: uint32(s.chunk), Call: c.id, Name: "x", RetainChunks: s.retain, Held: len(s.held) > 0,
			})
			if err != nil && !errors.Is(err, ErrClosed) {
				p.w.failf("%s announces %s: %v", p.name(), short(s.id), err)
			}
			s.failed = err != nil
			p.made = append(p.made, s)
			for _, h := range s.held { // the chunks between them may be offered later
				if err := p.m.Skip(p.w.now, s.id, h.lo, h.hi); err != nil && !errors.Is(err, ErrClosed) {
					p.w.failf("%s skips: %v", p.name(), err)
				}
			}
			return true
		}
		if p.offer(s) {
			return true
		}
	}
	return false
}

// sumStored (server) ends tensors, and the call when all are.
func (p *party) sumStored(c *worldCall) bool {
	summarize := func(s *source, id tensor.ID, code frame.Code) bool {
		p.w.tracef("server summarizes %v: %d", id, code)
		if s != nil {
			s.summed = true
		}
		p.m.Summarize(p.w.now, frame.Summary{Call: c.id, Tensor: id, Code: code, Message: map[bool]string{true: "by choice"}[code != frame.OK]})
		return true
	}
	if c.kind == put {
		for _, t := range c.sinks[1] {
			s := c.tensor(t.id)
			if s.summed || !t.whole && !t.failed {
				continue
			}
			if t.failed {
				return summarize(s, t.id, frame.Aborted)
			}
			if !bytes.Equal(t.data, s.data) {
				p.w.failf("server: %s is whole and wrong", short(t.id))
			}
			return summarize(s, t.id, frame.OK)
		}
		for id := range c.lost { // failed before they were announced to the server's program
			delete(c.lost, id)
			return summarize(c.tensor(id), id, frame.Aborted)
		}
	}
	if c.kind == get {
		for _, s := range c.outs {
			if !s.summed && len(s.pieces) == 0 || s.failed && !s.summed {
				code := frame.OK
				if s.failed {
					code = frame.Aborted
				}
				return summarize(s, s.id, code)
			}
		}
		if c.refused > 0 {
			c.refused--
			return summarize(nil, p.w.id('p'), frame.NotFound)
		}
	}
	if c.kind == put && !c.all || slices.ContainsFunc(c.tensors(), func(s *source) bool { return !s.summed }) {
		return false
	}
	c.finished = true
	p.w.tracef("server finishes %v", c.id)
	p.m.Finish(frame.Done{Call: c.id})
	return true
}

// eventStored handles what a machine tells of a put or a get, beyond what it tells of any
// call, and reports whether that is all.
func (p *party) eventStored(c *worldCall, t *sink, e Event) bool {
	w := p.w
	switch e.Kind {
	case EventReady:
		if c.ready++; c.ready > 1 || !p.server() {
			w.failf("%s: call %s is ready, time %d", p.name(), short(c.id), c.ready)
		}
		if c.kind == get {
			if n := len(e.Part.Get.Selections); n != c.selected || e.Part.Get.More {
				w.failf("server: %d selections of %d came, more %v", n, c.selected, e.Part.Get.More)
			}
			for range w.choose(7) {
				c.outs = append(c.outs, w.storedSource(p, c))
			}
			c.refused = w.choose(3)
		}
	case EventEnd:
		if c.all || !p.server() || c.kind != put {
			w.failf("%s: the end of %s came", p.name(), short(c.id))
		}
		c.all = true
	case EventFailed:
		s := c.tensor(e.Tensor)
		if s.blamed == "" && c.blamed == "" && !w.lossy {
			w.failf("%s: %s failed, nothing was done to it: %s", p.name(), short(e.Tensor), e.Text)
		}
		switch {
		case c.kind == get && p.server():
			s.failed = true
		case t != nil:
			t.failed = true
		case p.server():
			if c.lost == nil {
				c.lost = map[tensor.ID]bool{}
			}
			c.lost[e.Tensor] = true
		}
	case EventSummary:
		if _, twice := c.sums[e.Tensor]; twice || p.server() || e.Summary.Tensor != e.Tensor {
			w.failf("%s: a summary of %s", p.name(), short(e.Tensor))
		}
		c.sums[e.Tensor] = e.Summary.Code
		s := c.tensor(e.Tensor)
		switch {
		case s == nil && e.Summary.Code != frame.NotFound:
			w.failf("client: a summary of %s, which is unknown", short(e.Tensor))
		case s == nil:
		case e.Summary.Code != frame.OK && s.blamed == "" && c.blamed == "" && !w.lossy:
			w.failf("client: %s ended badly, nothing was done to it: %s", short(e.Tensor), e.Summary.Message)
		case c.kind == put && e.Summary.Code == frame.OK && !s.summed:
			w.failf("client: %s has a summary that nobody sent", short(e.Tensor))
		}
		if c.kind == put && s != nil {
			s.failed = true // nothing is offered for it any more
		}
	case EventSummed:
		if !p.server() {
			w.failf("client: summed")
		}
	case EventClosed:
		rot := func(s *source) bool { return s.rotten && !s.failed }
		if p.server() && slices.ContainsFunc(c.outs, rot) && c.blamed == "" && !w.closed && !w.lossy {
			w.failf("server: %s is closed, and nobody told of the rot", short(c.id))
		}
		if !p.server() && e.Code == frame.OK {
			w.endedStored(c)
		} else if !p.server() && c.blamed == "" && !w.closed && !w.lossy {
			w.failf("client: %s failed, nothing was done to it: %d %s", short(c.id), e.Code, e.Text)
		}
		return false
	default:
		return false
	}
	return true
}

// endedStored checks a put or a get that ended well.
func (w *world) endedStored(c *worldCall) {
	for _, s := range c.tensors() {
		code, ok := c.sums[s.id]
		i := slices.IndexFunc(c.sinks[0], func(t *sink) bool { return t.id == s.id })
		switch {
		case !ok && s.blamed == "":
			w.failf("client: %s ended without a summary of %s", short(c.id), short(s.id))
		case ok && code == frame.OK && c.kind == get && s.blamed == "":
			if i < 0 {
				w.failf("client: %s was never announced", short(s.id))
			}
			if t := c.sinks[0][i]; !t.whole || !bytes.Equal(t.data, s.data) {
				w.failf("client: %s is not right", short(s.id))
			}
		}
	}
}

// meddleStored ends a tensor of a put or a get on purpose.
func (w *world) meddleStored(c *worldCall, p *party) {
	all := c.tensors()
	if len(all) == 0 {
		return
	}
	s := all[w.choose(len(all))]
	sink := slices.IndexFunc(c.sinks[p.side()], func(t *sink) bool { return t.id == s.id })
	sends := (c.kind == put) != p.server()
	switch {
	case s.summed || !s.open || p.server() && (c.ready == 0 || c.finished):
	case sends && !p.server():
		w.blame(s.id, "given up")
		s.failed = true
		w.tracef("client gives up %v", s.id)
		p.m.GiveUp(s.id, frame.Cancelled, "by choice")
	case sends:
		w.blame(s.id, "source failed")
		s.failed = true
	case sink >= 0:
		w.blame(s.id, "tensor failed")
		w.tracef("%v fails tensor %v", p.name(), s.id)
		if p.server() {
			c.sinks[1][sink].failed = true
		} else {
			p.m.FailTensor(s.id, frame.ResourceExhausted, "by choice")
		}
	}
}

func (c *worldCall) String() string { return fmt.Sprintf("%s of kind %d", short(c.id), c.kind) }
