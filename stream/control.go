package stream

import (
	"slices"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/lifecycle"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

// Control handles the control parts of a frame; Claim handles its chunk. The machine copies
// what it retains. An error ends the session.
func (m *Machine) Control(now Instant, f *frame.Frame) error {
	if m.err != nil || m.shut {
		return m.err
	}
	if !m.helloSeen && f.Hello == nil {
		return m.violate(frame.InvalidArgument, "the first frame has no hello; a session opens with hello")
	}
	if f.Hello != nil {
		if err := m.hello(now, f.Hello); err != nil {
			return err
		}
	}
	if f.Empty() {
		m.alive = now
	}
	if wrong := f.CheckSender(!m.cfg.Server); wrong != "" {
		return m.violate(frame.InvalidArgument, "%s", wrong)
	}
	// Before calls: who may have one at a time acknowledges the last one's results with the next.
	for _, p := range f.Credits {
		if t := m.out.tensors[p.Tensor]; t == nil {
			m.unknown(p.Tensor)
		} else if m.out.Credit(&t.Out, p.Limit) {
			t.touch(now)
		}
	}
	for _, p := range f.Acks {
		if t := m.out.tensors[p.Tensor]; t != nil {
			m.ackPart(now, t, p)
		} else {
			m.unknown(p.Tensor)
		}
	}
	for i := range f.Calls {
		m.callPart(now, &f.Calls[i])
	}
	for i := range f.Descs {
		m.descPart(now, &f.Descs[i])
	}
	// Before cancels: a client that gives up a result sends both, and the failure has the
	// reason.
	for _, p := range f.Failures {
		m.failurePart(now, p)
	}
	for _, id := range f.Cancels {
		if k := m.calls.open[id]; k != nil {
			m.calls.giveUp(k, frame.Cancelled, "call cancelled by the client")
		}
	}
	for _, p := range f.Ends {
		m.endPart(now, p)
	}
	for i := range f.Dones {
		m.donePart(&f.Dones[i])
	}
	if !m.cfg.Server {
		for i := range f.Summaries {
			m.summaryPart(now, &f.Summaries[i])
		}
	}
	m.drained = m.drained || f.Drain != nil
	if n, most := len(m.failures)+len(m.calls.answers)+len(m.out.summaries), max(pendingControl, terms.HeldCalls*m.cfg.Limits.OpenCalls); n > most {
		return m.violate(frame.ResourceExhausted, "%d answers wait to be read, the limit is %d; read what the session sends", n, most)
	}
	if m.waiting > pendingBytes {
		return m.violate(frame.ResourceExhausted, "answers of %d bytes wait to be read, the limit is %d; read what the session sends", m.waiting, pendingBytes)
	}
	return nil
}

func (m *Machine) hello(now Instant, h *frame.Hello) error {
	if m.helloSeen {
		return m.violate(frame.InvalidArgument, "a second hello; a session opens once")
	}
	peer, code, bad := m.cfg.Accept(h)
	if bad != nil {
		return m.violate(bad.Code, "%s", bad.Text)
	}
	m.helloSeen, m.lastUse, m.peer, m.code = true, now, peer, code
	m.tell(Event{Kind: EventOpened})
	return nil
}

func (m *Machine) callPart(now Instant, p *frame.Call) {
	switch k := m.calls.open[p.ID]; {
	case m.tombstones.Has(p.ID):
	case k == nil:
		m.calls.accept(now, p)
	case k.part.Get != nil && p.Get != nil && k.part.Get.More && k.state == lifecycle.Opening:
		m.calls.further(now, k, p)
	case !k.part.Same(p):
		m.calls.end(k, lifecycle.EndedBadly, frame.Done{Code: frame.InvalidArgument, Message: "call " + p.ID.String() + " was sent again with different content; use a new id"})
	}
}

// descPart handles an announcement. An error fails the tensor and its call, not the
// session.
func (m *Machine) descPart(now Instant, p *frame.Desc) {
	if m.tombstones.Has(p.Tensor) {
		return
	}
	if t := m.in.tensors[p.Tensor]; t != nil {
		stored := t.call.part.Stored()
		if (!t.Desc.Same(p) || stored && t.Desc.Name != p.Name) && !(stored && t.Asm.Whole()) {
			m.fail(&t.Desc, t.call, frame.Errorf(frame.InvalidArgument, "tensor %s was announced before with another desc; use a new id", p.Tensor))
		}
		return
	}
	k := m.calls.open[p.Call]
	switch {
	case p.Call.IsZero():
		m.refuse(p.Tensor, frame.InvalidArgument, "desc names no call; every tensor of a session belongs to one")
		return
	case m.cfg.Server && k != nil && k.part.Get != nil:
		m.refuse(p.Tensor, frame.InvalidArgument, "desc names a get, whose tensors the server sends")
		return
	case k == nil && !m.tombstones.Has(p.Call):
		m.refuse(p.Tensor, frame.NotFound, "desc names call "+p.Call.String()+", which is not open; send the call first")
		return
	case k == nil || k.state > lifecycle.Finishing || k.state == lifecycle.Finishing && m.cfg.Server: // the call is over: whatever still arrives for it is late
		m.tombstones.Add(p.Tensor)
		return
	}
	most := m.cfg.Limits.TensorBytes
	if m.cfg.Server && k.part.Stored() {
		most = m.cfg.StoredBytes
		k.tensors++
		k.last = now
	}
	geo, bad := m.cfg.Admit(p, most, m.calls.load())
	if bad == nil && m.cfg.Server {
		problem := k.part.CheckInput(p)
		if k.ended {
			problem = "announced after the end of its put"
		}
		if problem != "" {
			bad = frame.Errorf(frame.InvalidArgument, "tensor %s: %s", p.Tensor, problem)
		}
	}
	if bad != nil {
		m.tombstones.Add(p.Tensor)
		m.fail(p, k, bad)
		return
	}
	t := m.in.announce(now, p, geo, k)
	if m.cfg.Server {
		t.retained = terms.RetainedByDesc(p, geo)
		m.calls.retain(k, t.retained)
		k.missing--
		m.calls.advance(k)
	}
}

func (m *Machine) ackPart(now Instant, t *out, p frame.Ack) {
	news, err := m.out.Acknowledge(now, &t.Out, p)
	if err != nil {
		m.lose(t, frame.Errorf(frame.InvalidArgument, "tensor %s: %s", p.Tensor, reason.Plain(err)))
		return
	}
	if news { // an acknowledgement without news is not progress
		t.touch(now)
	}
	if t.Chunks.Acked() && t.call.part.Put == nil { // a put's Summary ends it
		m.out.drop(t)
	}
	m.calls.advance(t.call) // the ack may cover a chunk that was to be sent again
}

// failurePart handles a tensor, this side's or the peer's, that the peer gives up.
func (m *Machine) failurePart(now Instant, p frame.Failure) {
	in, out := m.in.tensors[p.Tensor], m.out.tensors[p.Tensor]
	var k *call
	switch {
	case out != nil:
		k = out.call
	case in != nil:
		k = in.call
	default: // late, or for a tensor unknown here: an answer might be answered forever
		return
	}
	switch {
	case k.part.Stored() && in != nil && in.Asm.Whole(): // late
		return
	case k.part.Stored() && !m.cfg.Server: // the peer does not know it any more, and sends no Summary
		m.summaryPart(now, &frame.Summary{Call: k.part.ID, Tensor: p.Tensor, Code: p.Why(), Message: "given up by the server: " + p.Message, Reason: p.Reason})
		return
	case out != nil && !k.part.Stored():
		m.out.drop(out)
	case out == nil:
		m.in.drop(in)
	}
	text := frame.Clip(p.Message, frame.FailureTextBytes)
	switch why := frame.Errorf(p.Why(), "given up by the client: %s", text); {
	case k.part.Stored() && out != nil:
		m.lose(out, why)
	case k.part.Stored():
		m.fail(&in.Desc, k, why)
	case m.cfg.Server:
		m.calls.giveUp(k, p.Why(), text)
	default:
		m.calls.advance(k) // if done has arrived; otherwise the server still owes it
	}
}

func (m *Machine) donePart(p *frame.Done) {
	if k := m.calls.open[p.Call]; k != nil {
		d := *p
		d.Code = p.Code.Known()
		d.Message = frame.Clip(p.Message, frame.TextBytes)
		d.Outputs = slices.Clone(p.Outputs)
		m.calls.end(k, lifecycle.EndOf(d.Code), d)
	}
}

// unknown answers a frame that names a tensor that was never announced.
func (m *Machine) unknown(id tensor.ID) {
	if !m.calls.used(id) {
		m.refuse(id, frame.NotFound, "tensor "+id.String()+" is not known here; send its desc first")
	}
}

// refuse gives up, once, a tensor that has no state here: its later frames are late.
func (m *Machine) refuse(id tensor.ID, code frame.Code, text string) {
	m.tombstones.Add(id)
	m.sayFailed(id, &frame.Error{Code: code, Text: text})
}
