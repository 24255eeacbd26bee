package stream

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/tensorferry/tensorferry/assembler"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/flow"
	"github.com/tensorferry/tensorferry/internal/lifecycle"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

// A put and a get are calls in which each tensor ends by itself, with a Summary, and leaves
// nothing behind: a call may have a million. The client announces those of a put, the
// server those of a get, within the number that the peer keeps open.

// storing is what a call has that is a put or a get.
type storing struct {
	tensors uint64      // announced for a put
	ended   bool        // no more are announced
	unsent  int         // server: summaries to be sent
	putting int         // client: tensors that are announced and have no Summary
	further []frame.Get // client: parts of a get to be sent
	last    Instant     // of the last progress, or when this side last owed the next step
	patient Instant     // client: how long the server may take for progress; 0: ChunkIdle
}

// summary is a Summary to be sent.
type summary struct {
	frame.Summary
	call  *call
	frees bool // the peer has room for another tensor when it has read it
}

// Patience (client) limits how long the server may take for progress of a put or a get.
func (m *Machine) Patience(call tensor.ID, d Instant) {
	if k := m.calls.open[call]; k != nil {
		k.patient = d
	}
}

// EndPut (client) says that no more tensors are announced for a put.
func (m *Machine) EndPut(now Instant, call tensor.ID) {
	if k := m.calls.open[call]; k != nil && k.part.Put != nil && !k.ended {
		k.ended, k.last = true, now
		m.out.ending = append(m.out.ending, k)
	}
}

// Summarize (server) ends one tensor of a put or a get: s has its outcome. It is sent after
// the tensor's chunks, or at once if the code is not OK, and EventSummed follows. The
// tensor may be one that was not announced.
func (m *Machine) Summarize(now Instant, s frame.Summary) {
	k := m.calls.open[s.Call]
	t := m.out.tensors[s.Tensor]
	if t != nil && t.call != k {
		t = nil
	}
	if k == nil || k.state >= lifecycle.Finishing || t != nil && (t.summary != nil || t.summed) {
		return
	}
	k.last = now
	k.unsent++
	s.Message = frame.Clip(s.Message, frame.TextBytes)
	m.waiting += len(s.Message)
	q := &summary{Summary: s, call: k}
	if t := m.in.tensors[s.Tensor]; t != nil && t.call == k {
		m.in.drop(t)
	}
	if t == nil {
		m.out.summaries = append(m.out.summaries, q)
		return
	}
	if t.summary = q; s.Code != frame.OK {
		m.out.drop(t)
	}
	m.out.settle(t)
}

// settle has the summary of a tensor of a get sent, if its chunks are, and keeps nothing of
// a tensor that the peer has, or whose acknowledgement cannot come.
func (s *sender) settle(t *out) {
	if !t.call.part.Stored() || !t.Announced && !t.Dead {
		return
	}
	if s.peerDone || s.cfg.OneWay {
		t.Chunks.AckSent()
	}
	if t.summary != nil && (t.Dead || t.Chunks.Sent()) {
		t.summary.frees = true
		s.summaries = append(s.summaries, t.summary)
		t.summary, t.summed = nil, true
	}
	// Before its Summary, and while it may not have found what it holds, the peer counts it.
	if t.summed && t.Chunks.Acked() && (!t.Desc.Held || !s.peerDone) {
		s.drop(t)
	}
}

// addSummaries adds the outcomes of tensors, after what they end.
func (m *Machine) addSummaries(p *flow.Parcel) {
	for s := &m.out; len(s.summaries) > 0 && p.Room(len(p.Summaries)); {
		q := flow.Pop(&s.summaries, 0)
		p.Summaries = append(p.Summaries, q.Summary)
		p.Bytes += len(q.Name) + len(q.Message) + len(q.Reason) + 96
		m.waiting -= len(q.Message)
		q.call.unsent--
		m.tell(Event{Kind: EventSummed, Call: q.Call, Tensor: q.Tensor})
		m.calls.advance(q.call)
	}
}

// mayEnd reports whether the end of a put can be sent.
func (k *call) mayEnd() bool {
	return k.state != lifecycle.Opening && !slices.ContainsFunc(k.outs, func(t *out) bool { return !t.Announced })
}

// addEnds adds the ends of puts whose tensors are all announced.
func (s *sender) addEnds(p *flow.Parcel) {
	for i := 0; i < len(s.ending) && p.Room(len(p.Ends)); {
		if !s.ending[i].mayEnd() {
			i++
			continue
		}
		if k := flow.Pop(&s.ending, i); k.state == lifecycle.Running {
			p.Ends = append(p.Ends, frame.End{Call: k.part.ID, Tensors: k.tensors})
		}
	}
}

// endPart (server) handles the end of a put.
func (m *Machine) endPart(now Instant, p frame.End) {
	k := m.calls.open[p.Call]
	switch {
	case k == nil || k.part.Put == nil || k.ended:
	case p.Tensors != k.tensors:
		m.calls.giveUp(k, frame.InvalidArgument, fmt.Sprintf("the put ends after %d tensors, %d were announced", p.Tensors, k.tensors))
	default:
		k.ended, k.last = true, now
		m.tell(Event{Kind: EventEnd, Call: p.Call})
	}
}

// summaryPart (client) handles the outcome of a tensor.
func (m *Machine) summaryPart(now Instant, p *frame.Summary) {
	k := m.calls.open[p.Call]
	if k == nil || !k.part.Stored() || k.state > lifecycle.Finishing {
		return
	}
	k.last = now
	s := *p
	s.Code, s.Message = p.Code.Known(), frame.Clip(p.Message, frame.TextBytes)
	if t := m.out.tensors[p.Tensor]; t != nil && t.call == k {
		m.out.drop(t)
	}
	if t := m.in.tensors[p.Tensor]; t != nil && t.call == k {
		if t.summed = true; p.Code != frame.OK || t.Asm.Whole() && !t.Unchecked {
			m.in.drop(t)
		}
	}
	m.tell(Event{Kind: EventSummary, Call: p.Call, Tensor: p.Tensor, Summary: &s})
	m.calls.advance(k)
}

// GiveUp (client) gives up an outgoing tensor of a put, whose bytes cannot be had. The
// server's Summary still ends it. GiveUp reports whether the tensor was open.
func (m *Machine) GiveUp(id tensor.ID, code frame.Code, text string) bool {
	t := m.out.tensors[id]
	if t != nil {
		t.Chunks.Close()
		t.failed = &frame.Error{Code: code, Text: text}
		if t.Announced {
			m.sayFailed(id, t.failed)
		}
	}
	return t != nil
}

// Lost gives up an outgoing tensor whose bytes cannot be read any more.
func (m *Machine) Lost(id tensor.ID, text string) {
	if t := m.out.tensors[id]; t != nil {
		m.lose(t, frame.Errorf(frame.DataLoss, "%s", text))
	}
}

// lose gives up an outgoing tensor or, unless that is of a put or a get, its call.
func (m *Machine) lose(t *out, why *frame.Error) {
	switch q := t.summary; {
	case !t.call.part.Stored():
		m.fail(&t.Desc, t.call, why)
		return
	case q != nil: // its holder has said that it ends well
		m.waiting += len(why.Text) - len(q.Message)
		q.Summary = frame.Summary{Call: q.Call, Tensor: q.Tensor, Name: q.Name, SizeBytes: q.SizeBytes, Code: why.Code, Message: why.Text, Reason: why.Reason}
		m.out.drop(t)
		return
	case m.cfg.Server:
		m.out.drop(t)
	default:
		m.GiveUp(t.Desc.Tensor, why.Code, why.Text)
	}
	m.tell(Event{Kind: EventFailed, Call: t.call.part.ID, Tensor: t.Desc.Tensor, Desc: &t.Desc, Code: why.Code, Text: why.Text, Reason: why.Reason})
	m.calls.advance(t.call)
}

// Unread returns how long the peer has not read what was sent since, if that is too long:
// most, or as long as it may say that it waits, which a server does while a frame comes slowly.
func (m *Machine) Unread(now, since, most Instant) string {
	switch long := m.silent(now, since); {
	case m.cfg.OneWay && long != "":
		return long + "; pull again, and keep reading"
	case !m.cfg.OneWay && now-since > most && (m.cfg.Server || now-m.alive > most):
		return fmt.Sprintf("%v s", most.Seconds())
	}
	return ""
}

// Place has the chunks of an incoming tensor, to which nothing was lent, written to p, in any
// order: each when it comes, on the goroutine that has it.
func (m *Machine) Place(now Instant, id tensor.ID, p assembler.Placer) error {
	t := m.in.tensors[id]
	if t == nil {
		return ErrClosed
	}
	t.Asm.Place(p)
	t.touch(now)
	m.in.WantCredit(now, &t.In)
	return nil
}

// Hold (client) says that this side has the next n bytes of a tensor of a get, directly
// after those lent before. They end a chunk, as those before do. Hold fails as Lend does.
func (m *Machine) Hold(now Instant, id tensor.ID, n int64) error {
	t := m.in.tensors[id]
	if t == nil {
		return ErrClosed
	}
	t.Asm.Hold(n)
	t.touch(now)
	if t.Asm.Whole() {
		m.in.WantAck(now, &t.In, false)
		m.tell(Event{Kind: EventWhole, Call: t.call.part.ID, Tensor: id, Desc: &t.Desc})
		m.settled(t)
	} else {
		m.in.WantCredit(now, &t.In)
	}
	return nil
}

// Accept (client) says that a whole tensor of a get has the digest of its Summary. Until then,
// or until FailTensor gives it up, its last chunk is not acknowledged, and its call is open.
func (m *Machine) Accept(now Instant, id tensor.ID) {
	if t := m.in.tensors[id]; t != nil && t.Unchecked && t.Asm.Whole() {
		t.Unchecked = false
		t.touch(now)
		m.in.Arrived(now, &t.In)
		m.settled(t)
	}
}

// settled forgets a tensor of a get that is accepted and has its Summary, and advances its call.
func (m *Machine) settled(t *in) {
	if t.summed && t.Asm.Whole() && !t.Unchecked {
		m.in.drop(t)
	}
	m.calls.advance(t.call)
}

// Skip (server) leaves out the chunks [lo, hi) of a tensor of a get. The client has them and
// may acknowledge them at once: Skip directly follows OpenTensor.
func (m *Machine) Skip(now Instant, id tensor.ID, lo, hi uint32) error {
	t := m.out.tensors[id]
	if t == nil {
		return ErrClosed
	}
	t.Chunks.Skip(lo, hi)
	t.touch(now)
	m.out.settle(t)
	return nil
}

// owes reports whether the peer owes the next step of a put or a get.
func (k *call) owes(server bool) bool {
	if k.part.Put != nil != server { // this side sends
		feeds := slices.ContainsFunc(k.outs, func(t *out) bool { return t.Announced && !t.Waits() && t.failed == nil })
		return !feeds && (len(k.outs) > 0 || k.ended || server && k.state == lifecycle.Opening)
	}
	fills := slices.ContainsFunc(k.ins, func(t *in) bool { return t.Asm.Held() < t.Limit })
	lends := slices.ContainsFunc(k.ins, func(t *in) bool { return t.Asm.Held() >= t.Limit && (server || t.summed || !t.Asm.Whole()) })
	return fills || !lends && !(server && k.ended)
}

// expireStored gives up a put or a get whose peer made no progress.
func (m *Machine) expireStored(now Instant, k *call) {
	switch long := m.silent(now, k.last); {
	case !k.owes(m.cfg.Server):
		k.last = now
	case !m.cfg.Server && now >= min(max(k.last, m.alive), k.last+terms.SlowChunk)+cmp.Or(k.patient, m.cfg.Limits.ChunkIdle):
		m.calls.giveUp(k, frame.DeadlineExceeded, "the server made no progress")
	case !m.cfg.Server || long == "":
	case k.part.Put != nil:
		m.calls.giveUp(k, frame.DeadlineExceeded, fmt.Sprintf("no chunk arrived for %s; push again, at least %d bytes a second", long, terms.LeastRate))
	default:
		m.calls.giveUp(k, frame.DeadlineExceeded, fmt.Sprintf("the client has not read for %s; pull again, and keep reading", long))
	}
}
