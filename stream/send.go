package stream

import (
	"errors"
	"fmt"
	"slices"

	"github.com/tensorferry/tensorferry/chunker"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

// Errors of the sending side.
var (
	// ErrClosed is returned when the session, call or tensor is over.
	ErrClosed = errors.New("stream: closed")
	// ErrDraining is returned when a side opens nothing new.
	ErrDraining = errors.New("stream: draining")
)

// OpenCall (client) opens a call. Its inputs are announced by OpenTensor with
// the IDs that c names. The machine copies c's inputs and shares its Params.
func (m *Machine) OpenCall(now Instant, c frame.Call) error {
	switch {
	case m.shut || m.err != nil || m.peerDone:
		return ErrClosed
	case m.Draining():
		return ErrDraining
	case m.calls[c.ID] != nil || m.isGone(c.ID):
		return fmt.Errorf("stream: call %s was opened before; use a new id", c.ID)
	}
	// What the wire could not carry would end the session, and every other call.
	if problem := c.Check(); problem != "" {
		return fmt.Errorf("stream: %s", problem)
	}
	k := &call{part: c}
	k.part.Inputs = slices.Clone(c.Inputs)
	m.open(k, now)
	m.callQ = append(m.callQ, k)
	return nil
}

// OpenTensor announces an outgoing tensor of an open call: an input on the
// client, a result on the server. SizeBytes and OnAllowance are filled in here.
func (m *Machine) OpenTensor(now Instant, d frame.Desc) error {
	c := m.calls[d.Call]
	if m.shut || c == nil || c.finished {
		return ErrClosed
	}
	if m.outs[d.Tensor] != nil || m.ins[d.Tensor] != nil || m.isGone(d.Tensor) {
		return fmt.Errorf("stream: tensor %s was announced before; use a new id", d.Tensor)
	}
	if problem := d.CheckTexts(); problem != "" {
		return fmt.Errorf("stream: %s", problem)
	}
	size, err := d.Bytes()
	if err != nil {
		return err
	}
	geo, err := tensor.NewGeometry(size, int64(d.ChunkBytes))
	if err != nil {
		return err
	}
	d.SizeBytes = uint64(size)
	t := &out{desc: d, geo: geo, chunks: chunker.New(geo), call: c, last: now}
	m.outs[d.Tensor] = t
	c.outs = append(c.outs, t)
	if m.cfg.Server || c.sent { // else they go with the call
		m.descQ = append(m.descQ, t)
	}
	return nil
}

// Offer shares data as bytes [off, off+len) of an outgoing tensor until release,
// which runs once, on any goroutine. After an error it never runs.
func (m *Machine) Offer(now Instant, id tensor.ID, off int64, data []byte, release func()) error {
	t := m.outs[id]
	if t == nil || t.dead {
		return ErrClosed
	}
	waiting := t.chunks.Ready(^uint32(0))
	if err := t.chunks.Offer(off, data, release); err != nil {
		return err
	}
	if !waiting {
		t.last = now
	}
	m.queue(t)
	return nil
}

// Lend lends mem as the next bytes of an incoming tensor until done runs: once,
// inside Event, in the order of the events, before EventClosed of the tensor's call
// is returned. With true, every byte of mem is in place; with false, the tensor was
// given up and mem may hold anything. No claim that could touch mem is open then.
// done may be nil, and may call the machine. After an error, mem was not taken and
// done never runs. Lend panics when mem reaches past the tensor's end.
func (m *Machine) Lend(now Instant, id tensor.ID, mem []byte, done func(filled bool)) error {
	t := m.ins[id]
	if t == nil || t.dead || t.asm == nil {
		return ErrClosed
	}
	if t.asm.Held() >= t.limit {
		t.last = now // the peer was waiting for this
	}
	t.asm.Lend(mem, done)
	if t.asm.Limit() > t.limit && !t.desc.OnAllowance && !t.inCred {
		t.inCred = true
		m.creditQ = append(m.creditQ, t)
	}
	return nil
}

// Finish (server) decides how a call ends. The first decision stands: after a
// cancel or a failure it does nothing. done is sent once every chunk of its
// outputs has gone, or at once when the code is not OK.
func (m *Machine) Finish(d frame.Done) {
	c := m.calls[d.Call]
	if c == nil || !m.cfg.Server || m.shut || c.told || c.finished && (d.Code == frame.OK || c.done.Code != frame.OK) {
		return
	}
	if d.Code != frame.OK { // also in place of a good end that waits behind its chunks
		m.fail(c, d.Code, frame.Clip(d.Message, frame.TextBytes))
		c.done.RetryAfterMillis = d.RetryAfterMillis
		c.done.Timings = d.Timings
		return
	}
	m.finish(c)
	c.done = d
	for _, t := range c.ins {
		t.drop()
		m.dropIn(t)
	}
	m.shed(c)
	m.doneIf(c)
}

// doneIf (server) has done sent when a call has ended well and every chunk of
// its results has gone.
func (m *Machine) doneIf(c *call) {
	if m.cfg.Server && c.finished && c.done.Code == frame.OK && c.sentAll() {
		m.queueDone(c)
	}
}

func (m *Machine) queueDone(c *call) {
	if !c.told && !c.queued {
		c.queued = true
		m.waiting += len(c.done.Message)
		m.doneQ = append(m.doneQ, c)
	}
}

// fail (server) decides that a call ends badly; done goes at once. A call that
// ended well but whose done is still behind its chunks fails all the same.
func (m *Machine) fail(c *call, code frame.Code, text string) {
	if c.told || c.finished && c.done.Code != frame.OK {
		return
	}
	m.stop(c, code, text)
	m.queueDone(c)
	for _, t := range c.ins {
		m.dropIn(t)
	}
	m.shed(c)
}

// Cancel (client) stops a call: the server is told, and the call's memory is let
// go without waiting for the answer.
func (m *Machine) Cancel(id tensor.ID, code frame.Code, text string) {
	if c := m.calls[id]; c != nil && !m.cfg.Server {
		m.abandon(c, code, text)
	}
}

// abandon (client) ends a call from this side.
func (m *Machine) abandon(c *call, code frame.Code, text string) {
	if c.told {
		return
	}
	m.stop(c, code, text)
	if c.sent {
		m.cancelQ = append(m.cancelQ, c.part.ID)
	} else {
		m.callQ = slices.DeleteFunc(m.callQ, func(q *call) bool { return q == c })
	}
	c.told = true
	m.settle(c)
}

// Drain announces that this side opens and takes nothing new.
func (m *Machine) Drain(reason string) {
	if !m.draining && !m.shut {
		m.draining = true
		m.drain = &frame.Drain{Reason: reason}
	}
}

// queue puts a tensor among those that take turns, if it has something to send.
func (m *Machine) queue(t *out) {
	if t.queued || t.dead || !t.announced || !t.chunks.Ready(t.sendLimit()) {
		return
	}
	t.queued = true
	if t.desc.OnAllowance {
		m.small = append(m.small, t)
	} else {
		m.ring = append(m.ring, t)
	}
}

func (t *out) sendLimit() uint32 {
	if t.desc.OnAllowance {
		return t.geo.Count()
	}
	return t.limit
}

func (c *call) sentAll() bool {
	for _, t := range c.outs {
		if !t.dead && !t.chunks.Sent() {
			return false
		}
	}
	return true
}

// Pending reports whether Next has something to send now.
func (m *Machine) Pending() bool {
	if m.shut {
		return false
	}
	if !m.helloSent {
		return !m.cfg.Server || m.helloSeen
	}
	return m.helloSeen && (len(m.small)+len(m.ring)+len(m.creditQ)+len(m.cancelQ)+len(m.failQ)+len(m.doneQ) > 0 ||
		m.drain != nil || len(m.ackQ) > 0 && m.lazyAt == 0 ||
		m.canOpen() || m.canAnnounce())
}

// canOpen (client) reports whether the next call may be opened: a call waits here
// while it would pass what the peer keeps open.
func (m *Machine) canOpen() bool {
	return len(m.callQ) > 0 && (m.opened == 0 || m.opened+m.callQ[0].weight() <= int(m.peer.MaxOpenTensors))
}

// canAnnounce reports whether the next desc may go: a result waits here while it
// would pass what the peer keeps open; inputs have waited with their call.
func (m *Machine) canAnnounce() bool {
	return len(m.descQ) > 0 && (!m.cfg.Server || m.announced < int(m.peer.MaxOpenTensors))
}

// Next fills f, which must be empty, with what is to be sent next: control parts
// that wait, and at most one chunk. The chunk's views are shared until held, if
// not nil, is released; the encoding by Codec, if it is worth it, and the checksum
// are for the caller. It reports whether f has anything in it.
func (m *Machine) Next(now Instant, f *frame.Frame) (held chunker.Releaser, ok bool) {
	if !m.Pending() {
		return nil, false
	}
	if !m.helloSent {
		m.helloSent = true
		f.Hello = &frame.Hello{
			Version: frame.Version, Session: m.cfg.Session, MaxChunkBytes: m.limits.ChunkBytes,
			AllowanceBytes: m.limits.AllowanceBytes, Checksum: uint8(m.kind), MaxOpenTensors: uint32(m.limits.OpenTensors),
		}
		for _, k := range m.cfg.Codecs {
			f.Hello.Codecs = append(f.Hello.Codecs, uint8(k))
		}
		if !m.helloSeen {
			return nil, true
		}
	}
	bytes := 0
	room := func() bool { return bytes < frameBytes }
	// What ends frees places and allowance at the peer, and it reads a frame's
	// calls and descs first: those that may need the places go with the next.
	ends := len(m.cancelQ)+len(m.doneQ) > 0
	for !ends && len(f.Calls) < frameParts && room() && m.canOpen() {
		c := m.callQ[0]
		m.callQ = slices.Delete(m.callQ, 0, 1)
		c.sent = true
		m.opened += c.weight()
		f.Calls = append(f.Calls, c.part)
		bytes += c.part.Cost()
		m.descQ = append(m.descQ, c.outs...)
	}
	for !ends && len(f.Descs) < frameParts && room() && m.canAnnounce() {
		t := m.descQ[0]
		m.descQ = slices.Delete(m.descQ, 0, 1)
		if t.dead {
			continue
		}
		t.announced = true
		t.last = now
		m.announced++
		if t.geo.Size <= int64(m.peer.AllowanceBytes)-m.allowOut && t.geo.Count() <= frame.AllowanceChunks {
			t.desc.OnAllowance = true
			t.share = t.geo.Size
			m.allowOut += t.share
		}
		f.Descs = append(f.Descs, t.desc)
		bytes += t.desc.Cost()
		m.queue(t)
	}
	for len(m.creditQ) > 0 && len(f.Credits) < frameParts {
		t := m.creditQ[len(m.creditQ)-1]
		m.creditQ = m.creditQ[:len(m.creditQ)-1]
		t.inCred = false
		if t.dead {
			continue
		}
		t.limit = t.asm.Limit()
		f.Credits = append(f.Credits, frame.Credit{Tensor: t.desc.Tensor, Limit: t.limit})
	}
	for len(m.ackQ) > 0 && len(f.Acks) < frameParts {
		t := m.ackQ[len(m.ackQ)-1]
		m.ackQ = m.ackQ[:len(m.ackQ)-1]
		t.inAck = false
		if t.dead && (m.cfg.Server || !t.whole()) {
			continue // done says more than an ack could
		}
		t.acked = t.asm.Below()
		n := min(len(t.resend), frameParts)
		f.Acks = append(f.Acks, frame.Ack{Tensor: t.desc.Tensor, Below: t.acked, Resend: t.resend[:n:n]})
		if t.resend = t.resend[n:]; len(t.resend) > 0 {
			t.inAck = true
			m.ackQ = append(m.ackQ, t)
			break
		}
		t.resend = nil
		if t.asm.Whole() {
			m.uncount(t)
		}
	}
	m.lazyAt = 0
	for len(m.cancelQ) > 0 && len(f.Cancels) < frameParts {
		f.Cancels = append(f.Cancels, m.cancelQ[0])
		m.cancelQ = slices.Delete(m.cancelQ, 0, 1)
	}
	for len(m.failQ) > 0 && len(f.Failures) < frameParts && room() {
		f.Failures = append(f.Failures, m.failQ[0])
		bytes += len(m.failQ[0].Message) + 64
		m.waiting -= len(m.failQ[0].Message)
		m.failQ = slices.Delete(m.failQ, 0, 1)
	}
	if room() { // else the parts and a chunk could be more than a frame may have
		held = m.nextChunk(now, f)
	}
	for len(m.doneQ) > 0 && len(f.Dones) < frameParts && room() {
		c := m.doneQ[0]
		m.doneQ = slices.Delete(m.doneQ, 0, 1)
		c.queued, c.told = false, true
		f.Dones = append(f.Dones, c.done)
		bytes += len(c.done.Message) + 128
		m.waiting -= len(c.done.Message)
		m.settle(c)
	}
	if m.drain != nil {
		f.Drain, m.drain = m.drain, nil
	}
	m.trim()
	return held, !f.Empty()
}

// trim lets go of queues that were long and are empty.
func (m *Machine) trim() {
	m.callQ, m.doneQ = trimmed(m.callQ), trimmed(m.doneQ)
	m.descQ, m.ring, m.small = trimmed(m.descQ), trimmed(m.ring), trimmed(m.small)
	m.creditQ, m.ackQ = trimmed(m.creditQ), trimmed(m.ackQ)
	m.cancelQ, m.failQ = trimmed(m.cancelQ), trimmed(m.failQ)
}

func trimmed[T any](q []T) []T {
	if len(q) == 0 && cap(q) > keptQueue {
		return nil
	}
	return q
}

// nextChunk puts the next chunk of the tensor whose turn it is into f.
func (m *Machine) nextChunk(now Instant, f *frame.Frame) chunker.Releaser {
	for len(m.small)+len(m.ring) > 0 {
		var t *out
		small := len(m.small) > 0 && (len(m.ring) == 0 || m.smallRun < smallRun)
		if small {
			m.smallRun++
			t = m.small[0]
		} else {
			m.smallRun = 0
			m.turn %= len(m.ring)
			t = m.ring[m.turn]
		}
		index, ok := uint32(0), false
		if !t.dead {
			index, ok = t.chunks.Take(t.sendLimit())
		}
		switch {
		case ok && t.chunks.Ready(t.sendLimit()):
			if !small {
				m.turn++ // its next chunk waits for the next turn
			}
		case small:
			m.small = slices.Delete(m.small, 0, 1)
			t.queued = false
		default:
			m.ring = slices.Delete(m.ring, m.turn, m.turn+1)
			t.queued = false
		}
		if !ok {
			continue
		}
		var held chunker.Releaser
		f.Chunk.Tensor, f.Chunk.Index = t.desc.Tensor, index
		f.Chunk.Data, held = t.chunks.View(index, f.Chunk.Data[:0])
		t.last = now
		m.stats.ChunksOut++
		m.stats.BytesOut += int64(f.Chunk.Len())
		if m.peerDone {
			t.chunks.AckSent()
		}
		m.doneIf(t.call)
		return held
	}
	return nil
}
