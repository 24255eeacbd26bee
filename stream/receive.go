package stream

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/tensorferry/tensorferry/assembler"
	"github.com/tensorferry/tensorferry/chunker"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

// Control handles the control parts of a frame; its chunk is left to Claim. The
// machine copies what it keeps. An error ends the session.
func (m *Machine) Control(now Instant, f *frame.Frame) error {
	if m.err != nil {
		return m.err
	}
	if m.shut {
		return nil
	}
	if !m.helloSeen && f.Hello == nil {
		return m.violate(frame.InvalidArgument, "the first frame has no hello; a session opens with hello")
	}
	if f.Hello != nil {
		if err := m.hello(now, f.Hello); err != nil {
			return err
		}
	}
	for i := range f.Calls {
		if err := m.callPart(now, &f.Calls[i]); err != nil {
			return err
		}
	}
	for i := range f.Descs {
		m.descPart(now, &f.Descs[i])
	}
	for _, p := range f.Credits {
		m.creditPart(now, p)
	}
	for _, p := range f.Acks {
		m.ackPart(now, p)
	}
	// Before cancels: a client that gives a result up sends both, and says why here.
	for _, p := range f.Failures {
		m.failurePart(p)
	}
	for _, id := range f.Cancels {
		if !m.cfg.Server {
			return m.violate(frame.InvalidArgument, "cancel came from the server; only a client cancels")
		}
		if c := m.calls[id]; c != nil {
			m.fail(c, frame.Cancelled, "call cancelled by the client")
			m.giveUp(c)
		}
	}
	for i := range f.Dones {
		if m.cfg.Server {
			return m.violate(frame.InvalidArgument, "done came from the client; only a server ends calls")
		}
		m.donePart(&f.Dones[i])
	}
	if f.Drain != nil && !m.drained {
		m.drained = true
		m.tell(Event{Kind: EventDrain, Text: f.Drain.Reason})
	}
	if n, most := len(m.failQ)+len(m.doneQ), max(pendingControl, heldCalls*m.limits.OpenCalls); n > most {
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
	if bad := h.Check(); bad != nil {
		return m.violate(bad.Code, "%s", bad.Text)
	}
	kind := codec.Checksum(h.Checksum)
	if m.cfg.Server {
		m.cfg.Session = h.Session
		m.kind = kind
	} else if kind != m.kind || h.Session != m.cfg.Session {
		return m.violate(frame.InvalidArgument, "the server's hello names another session or checksum")
	}
	m.helloSeen = true
	m.lastUse = now
	m.peer = *h
	set(&m.peer.MaxChunkBytes, 1*mib, frame.ChunkBytesCeiling)
	m.peer.AllowanceBytes = min(m.peer.AllowanceBytes, frame.AllowanceCeiling)
	m.code = codec.Choose(m.cfg.Codecs, h.Codecs[:min(len(h.Codecs), frame.HelloCodecs)])
	m.peer.Codecs = nil // lent with the frame
	set(&m.peer.MaxOpenTensors, 64, 1<<16)
	m.tell(Event{Kind: EventOpened})
	return nil
}

func (m *Machine) callPart(now Instant, p *frame.Call) error {
	if !m.cfg.Server {
		return m.violate(frame.InvalidArgument, "call came from the server; only a client opens calls")
	}
	if m.isGone(p.ID) {
		return nil
	}
	if c := m.calls[p.ID]; c != nil {
		if !sameCall(&c.part, p) {
			m.fail(c, frame.InvalidArgument, "call "+p.ID.String()+" came again with other content; use a new id")
		}
		return nil
	}
	c := &call{part: *p, missing: len(p.Inputs)}
	m.open(c, now)
	refuse := func(code frame.Code, retry uint32, format string, args ...any) {
		c.part = frame.Call{ID: p.ID} // what it asked for is not worth its memory
		m.fail(c, code, fmt.Sprintf(format, args...))
		c.done.RetryAfterMillis = retry
	}
	problem := cmp.Or(frame.CheckName("model", p.Model), frame.CheckEntries("params", p.Params))
	kept := keptOf(p)
	switch {
	case m.draining:
		refuse(frame.Unavailable, 1000, "server is draining; call another one, or this one later")
	case m.running > m.limits.OpenCalls:
		refuse(frame.ResourceExhausted, 100, "open calls: the limit of a session is %d; wait for one to end", m.limits.OpenCalls)
	case len(m.calls) > heldCalls*m.limits.OpenCalls:
		refuse(frame.ResourceExhausted, 100, "results of %d calls wait; acknowledge them", len(m.calls)-1)
	case len(p.Inputs) > m.limits.OpenTensors:
		refuse(frame.ResourceExhausted, 0, "call has %d inputs; open tensors are limited to %d", len(p.Inputs), m.limits.OpenTensors)
	case p.Model == "":
		refuse(frame.InvalidArgument, 0, "call names no model")
	case problem != "":
		refuse(frame.InvalidArgument, 0, "%s", problem)
	case kept > m.unkept():
		refuse(frame.ResourceExhausted, 100, "%s", m.full("call", kept))
	default:
		c.part.Inputs = slices.Clone(p.Inputs)
		for i, b := range p.Inputs {
			if problem := frame.CheckName("port", b.Port); problem != "" {
				refuse(frame.InvalidArgument, 0, "%s", problem)
				return nil
			}
			for _, o := range p.Inputs[:i] {
				if o.Port == b.Port || o.Tensor == b.Tensor {
					refuse(frame.InvalidArgument, 0, "inputs %q and %q share a port or a tensor", o.Port, b.Port)
					return nil
				}
			}
			if m.ins[b.Tensor] != nil || m.outs[b.Tensor] != nil || m.isGone(b.Tensor) {
				refuse(frame.InvalidArgument, 0, "tensor %s was used before; each input needs a new id", b.Tensor)
				return nil
			}
		}
		m.keep(c, kept)
		m.readyIf(c)
	}
	return nil
}

// keep counts what a call keeps, until it is settled.
func (m *Machine) keep(c *call, n int) {
	c.kept += n
	m.kept += n
}

// unkept (server) is how much more calls may keep.
func (m *Machine) unkept() int { return keptBytes + m.limits.OpenTensors*tensorBytes - m.kept }

func (m *Machine) full(what string, n int) string {
	return fmt.Sprintf("%s takes %d bytes with its names, entries and chunk table; the limit of a session's calls is %d, %d are left; wait for a call to end",
		what, n, m.unkept()+m.kept, m.unkept())
}

func sameCall(a, b *frame.Call) bool {
	if a.Model != b.Model || len(a.Inputs) != len(b.Inputs) || len(a.Params) != len(b.Params) || a.TimeoutMillis != b.TimeoutMillis {
		return false
	}
	for i := range a.Inputs {
		if a.Inputs[i] != b.Inputs[i] {
			return false
		}
	}
	for k, v := range a.Params {
		if w, ok := b.Params[k]; !ok || v != w {
			return false
		}
	}
	return true
}

func (m *Machine) readyIf(c *call) {
	if c.missing == 0 && !c.ready && !c.finished {
		c.ready = true
		m.tell(Event{Kind: EventReady, Call: c.part.ID, Part: &c.part})
	}
}

// descPart takes an announcement. What is wrong with it fails the tensor and its
// call, not the session.
func (m *Machine) descPart(now Instant, p *frame.Desc) {
	if m.isGone(p.Tensor) {
		return
	}
	c := m.calls[p.Call]
	if t := m.ins[p.Tensor]; t != nil {
		if !sameDesc(&t.desc, p) && !t.dead {
			m.failIn(t, frame.InvalidArgument, "tensor "+p.Tensor.String()+" was announced before with another desc; use a new id")
		}
		return
	}
	if c == nil {
		if m.isGone(p.Call) {
			m.forget(p.Tensor)
		} else {
			m.refuse(p.Tensor, frame.NotFound, "desc names call "+p.Call.String()+", which is not open; send the call first")
		}
		return
	}
	if c.finished && (m.cfg.Server || c.done.Code != frame.OK) {
		m.forget(p.Tensor) // the call is over: whatever still comes for it is late
		return
	}
	geo, code, text := m.admit(p, c)
	if text != "" {
		m.refuse(p.Tensor, code, text)
		m.failCall(c, code, text)
		return
	}
	t := &in{desc: *p, geo: geo, asm: assembler.New(p.Tensor, geo, m.kind, m.free), call: c, last: now}
	t.desc.Shape = p.Shape.Clone()
	m.ins[p.Tensor] = t
	m.incoming++
	t.open = true
	c.ins = append(c.ins, t)
	if p.OnAllowance {
		t.share = t.geo.Size
		m.allowIn += t.share
	}
	m.tell(Event{Kind: EventTensor, Call: c.part.ID, Tensor: p.Tensor, Desc: &t.desc})
	if m.cfg.Server {
		m.keep(c, keptOfDesc(p, geo))
		c.missing--
		m.readyIf(c)
	}
}

// admit checks a desc against shape arithmetic, limits and its call, before anything
// of it is kept, and returns how the tensor is cut.
func (m *Machine) admit(p *frame.Desc, c *call) (tensor.Geometry, frame.Code, string) {
	name := "tensor " + p.Tensor.String() + ": "
	geo, bad := p.Check(m.limits.ChunkBytes, m.limits.TensorBytes)
	switch {
	case bad != nil:
		return geo, bad.Code, bad.Text
	case m.incoming >= m.limits.OpenTensors:
		return geo, frame.ResourceExhausted, fmt.Sprintf("%sopen tensors: the limit of a session is %d", name, m.limits.OpenTensors)
	}
	size := geo.Size
	if n := geo.Count(); p.OnAllowance && n > frame.AllowanceChunks {
		return geo, frame.ResourceExhausted, fmt.Sprintf("%s%d chunks on allowance, the limit is %d; send larger chunks, or wait for credit instead", name, n, frame.AllowanceChunks)
	}
	if left := int64(m.limits.AllowanceBytes) - m.allowIn; p.OnAllowance && size > left {
		return geo, frame.ResourceExhausted, fmt.Sprintf("%s%d bytes on allowance, %d are left; wait for credit instead", name, size, left)
	}
	if m.cfg.Server {
		for _, b := range c.part.Inputs {
			if b.Tensor == p.Tensor {
				if b.Port != p.Port {
					return geo, frame.InvalidArgument, fmt.Sprintf("%sport is %q, the call says %q", name, p.Port, b.Port)
				}
				if n := keptOfDesc(p, geo); n > m.unkept() {
					return geo, frame.ResourceExhausted, name + m.full("desc", n)
				}
				return geo, frame.OK, ""
			}
		}
		return geo, frame.InvalidArgument, name + "its call does not list it as an input"
	}
	return geo, frame.OK, ""
}

func sameDesc(a, b *frame.Desc) bool {
	return a.Desc.Equal(b.Desc) && a.SizeBytes == b.SizeBytes && a.ChunkBytes == b.ChunkBytes && a.Call == b.Call && a.Port == b.Port
}

func (m *Machine) creditPart(now Instant, p frame.Credit) {
	t := m.outs[p.Tensor]
	if t == nil {
		m.unknown(p.Tensor)
		return
	}
	if limit := min(p.Limit, t.geo.Count()); limit > t.limit {
		t.limit = limit
		t.last = now
		m.queue(t)
	}
}

func (m *Machine) ackPart(now Instant, p frame.Ack) {
	t := m.outs[p.Tensor]
	if t == nil {
		m.unknown(p.Tensor)
		return
	}
	before := t.chunks.Below()
	err := t.chunks.Ack(p.Below)
	for _, i := range p.Resend {
		if err == nil {
			err = t.chunks.Resend(i)
		}
	}
	if err != nil {
		m.failOut(t, frame.InvalidArgument, "tensor "+p.Tensor.String()+": "+err.Error())
		return
	}
	if t.chunks.Below() > before { // an ack that tells nothing new is no progress
		t.last = now
	}
	m.queue(t)
	if t.chunks.Acked() {
		m.dropOut(t)
	}
	m.doneIf(t.call) // the ack may have answered for a chunk that was to be sent again
	m.settle(t.call)
}

// failurePart is the peer giving up a tensor, ours or its own.
func (m *Machine) failurePart(p frame.Failure) {
	code := p.Code
	if code == frame.OK {
		code = frame.Internal
	}
	var c *call
	if t := m.outs[p.Tensor]; t != nil {
		c = t.call
		m.dropOut(t)
	} else if t := m.ins[p.Tensor]; t != nil {
		c = t.call
		t.drop()
	}
	if c == nil {
		return // late, or an answer to something we never sent: answering would echo for ever
	}
	if m.cfg.Server {
		m.fail(c, code, frame.Clip(p.Message, frame.FailureTextBytes))
		m.giveUp(c)
		return
	}
	m.finishClient(c) // if done has come; if not, the server owes it
}

func (m *Machine) donePart(p *frame.Done) {
	c := m.calls[p.Call]
	if c == nil || !c.sent || c.finished {
		return
	}
	c.done = *p
	c.done.Message = frame.Clip(p.Message, frame.TextBytes)
	c.done.Outputs = slices.Clone(p.Outputs)
	m.finish(c)
	if p.Code != frame.OK {
		for _, t := range c.ins {
			t.drop()
		}
		c.told = true
	}
	m.finishClient(c)
}

// finishClient ends a call whose done has come, once every output it names is whole.
func (m *Machine) finishClient(c *call) {
	if m.cfg.Server || !c.finished {
		return
	}
	if c.done.Code == frame.OK && !c.told {
		lost, wait := "", false
		for _, b := range c.done.Outputs {
			switch t := m.ins[b.Tensor]; {
			case t == nil || t.call != c:
				lost = fmt.Sprintf("the server named result %q and never announced it", b.Port)
			case t.whole():
			case t.dead:
				lost = fmt.Sprintf("result %q was given up", b.Port)
			default:
				wait = true
			}
		}
		for _, t := range c.ins {
			if lost == "" && !slices.Contains(c.done.Outputs, frame.Binding{Port: t.desc.Port, Tensor: t.desc.Tensor}) {
				lost = fmt.Sprintf("the server announced result %q and did not end with it", t.desc.Port)
			}
		}
		switch {
		case lost != "":
			m.abandon(c, frame.DataLoss, lost) // the server need not wait for acknowledgements
			return
		case wait:
			return
		}
		c.told = true
	}
	m.settle(c)
}

// Claim decides about the chunk of a frame whose control parts were handled.
// With true, the caller copies the bytes by c.Copy, outside any lock it likes,
// and then calls Commit. An error ends the session.
func (m *Machine) Claim(now Instant, ch *frame.Chunk, c *Claim) (bool, error) {
	if m.err != nil {
		return false, m.err
	}
	if ch.Tensor.IsZero() || m.shut {
		return false, nil
	}
	t := m.ins[ch.Tensor]
	if t == nil {
		m.unknown(ch.Tensor)
		return false, nil
	}
	if t.dead || t.asm == nil {
		return false, nil
	}
	k := codec.Codec(ch.Codec)
	if k != codec.None && !slices.Contains(m.cfg.Codecs, k) {
		m.failIn(t, frame.InvalidArgument, fmt.Sprintf("tensor %s: chunk %d came in %v, which the hello of this side does not name", ch.Tensor, ch.Index, k))
		return false, nil
	}
	verdict, err := t.asm.Claim(&c.claim, ch.Index, ch.Len(), k, ch.Sum)
	switch {
	case err != nil:
		m.failIn(t, frame.InvalidArgument, "tensor "+ch.Tensor.String()+": "+err.Error())
		return false, nil
	case verdict == assembler.Duplicate:
		m.stats.Duplicate++
		m.wantAck(now, t, true) // the peer sent again: perhaps an ack was lost to it
		return false, nil
	}
	t.last = now
	t.call.busy++
	c.tensor = t
	return true, nil
}

// Claim is a chunk being copied to its place, reused from chunk to chunk.
type Claim struct {
	claim  assembler.Claim
	tensor *in
}

// Copy writes the chunk's bytes, borrowed, to their place and returns their
// checksum, and an error when they could not be decoded. It may run beside the
// machine.
func (c *Claim) Copy(views [][]byte) (got uint32, err error) { return c.claim.Copy(views) }

// Commit ends a claim with what Copy returned.
func (m *Machine) Commit(now Instant, c *Claim, got uint32, failed error) {
	t := c.tensor
	c.tensor = nil
	t.call.busy--
	off, n := t.geo.Span(c.claim.Index())
	at := len(m.events)
	ok, err := t.asm.Commit(&c.claim, got, failed)
	if t.dead || m.shut {
		m.settle(t.call)
		m.shed(t.call)
		return
	}
	if err != nil {
		code := frame.DataLoss
		if errors.Is(err, codec.ErrDecode) { // it came as it was sent
			code = frame.InvalidArgument
		}
		m.failIn(t, code, "tensor "+t.desc.Tensor.String()+": "+err.Error())
		return
	}
	if !ok {
		m.stats.Corrupt++
		if len(t.resend) == chunker.MaxResends {
			m.failIn(t, frame.DataLoss, fmt.Sprintf("tensor %s: %d chunks have a wrong checksum and wait to be asked for again", t.desc.Tensor, len(t.resend)+1))
			return
		}
		t.resend = append(t.resend, c.claim.Index())
		m.wantAck(now, t, true)
		return
	}
	m.stats.ChunksIn++
	m.stats.BytesIn += n
	// Before the memory that the chunk has filled is returned.
	m.events = slices.Insert(m.events, at, Event{Kind: EventChunk, Call: t.call.part.ID, Tensor: t.desc.Tensor, Desc: &t.desc, Off: off, N: n})
	if t.asm.Whole() {
		m.tell(Event{Kind: EventWhole, Call: t.call.part.ID, Tensor: t.desc.Tensor, Desc: &t.desc})
		// Only the sender's memory waits for this one, unless that memory is
		// scarce or half of the allowance hangs on it.
		m.wantAck(now, t, t.desc.RetainChunks > 0 && !t.desc.OnAllowance || m.allowIn > int64(m.limits.AllowanceBytes)/2)
		m.finishClient(t.call)
		return
	}
	if news := t.asm.Below() - t.acked; t.desc.RetainChunks > 0 && news > 0 {
		// Before it is due, too: the sender may keep less than it hoped for.
		m.wantAck(now, t, news >= max(1, t.desc.RetainChunks/ackShare))
	}
}

// wantAck has an acknowledgement sent: now, or with the next frame that goes.
func (m *Machine) wantAck(now Instant, t *in, urgent bool) {
	if !t.inAck {
		t.inAck = true
		m.ackQ = append(m.ackQ, t)
		if len(m.ackQ) == 1 {
			m.lazyAt = now + lazyAck
		}
	}
	if urgent {
		m.lazyAt = 0
	}
}

// unknown answers a frame that names a tensor nobody announced.
func (m *Machine) unknown(id tensor.ID) {
	if !m.isGone(id) && m.ins[id] == nil && m.outs[id] == nil {
		m.refuse(id, frame.NotFound, "tensor "+id.String()+" is not known here; send its desc first")
	}
}

// refuse gives up a tensor that has no state here, once: later frames of it are late.
func (m *Machine) refuse(id tensor.ID, code frame.Code, text string) {
	m.forget(id)
	m.sayFailed(id, code, text)
}

func (m *Machine) sayFailed(id tensor.ID, code frame.Code, text string) {
	m.failQ = append(m.failQ, frame.Failure{Tensor: id, Code: code, Message: text})
	m.waiting += len(text)
}

// failIn gives up an incoming tensor and its call.
func (m *Machine) failIn(t *in, code frame.Code, text string) {
	if t.dead {
		return
	}
	t.drop()
	m.sayFailed(t.desc.Tensor, code, text)
	m.failCall(t.call, code, text)
}

// failCall ends a call badly from this side.
func (m *Machine) failCall(c *call, code frame.Code, text string) {
	if m.cfg.Server {
		m.fail(c, code, text)
		return
	}
	m.abandon(c, code, text)
}

// failOut gives up an outgoing tensor and its call.
func (m *Machine) failOut(t *out, code frame.Code, text string) {
	m.sayFailed(t.desc.Tensor, code, text)
	m.failCall(t.call, code, text)
	if m.cfg.Server {
		m.giveUp(t.call)
	}
}

// FailTensor gives up an incoming tensor for a reason of the caller's, with its call.
func (m *Machine) FailTensor(id tensor.ID, code frame.Code, text string) {
	if t := m.ins[id]; t != nil {
		m.failIn(t, code, text)
	}
}
