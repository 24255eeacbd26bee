package stream

import (
	"fmt"
	"slices"

	"github.com/tensorferry/tensorferry/chunker"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/flow"
	"github.com/tensorferry/tensorferry/internal/lifecycle"
	"github.com/tensorferry/tensorferry/internal/recent"
	"github.com/tensorferry/tensorferry/terms"
)

// Pending reports whether Next has something to send now.
func (m *Machine) Pending() bool {
	switch {
	case m.shut:
		return false
	case !m.helloSent:
		return !m.cfg.Server || m.helloSeen
	}
	return m.helloSeen && (m.waits || m.out.Ready(false) || len(m.calls.cancels)+len(m.calls.answers)+len(m.failures) > 0 || m.drain != nil || m.in.DueNow() ||
		m.calls.mayOpen() || m.out.mayAnnounce() >= 0 ||
		len(m.out.summaries) > 0 || slices.ContainsFunc(m.out.ending, (*call).mayEnd))
}

// Next fills f, which must be empty, with what is to be sent next: waiting control parts
// and at most one chunk. The chunk's views are shared until held, if not nil, is released.
// The caller encodes the chunk with Status.Codec, if that pays off, and computes the
// checksum. Next reports whether it put anything into f.
func (m *Machine) Next(now Instant, f *frame.Frame) (held chunker.Releaser, ok bool) {
	if !m.Pending() {
		return nil, false
	}
	if !m.helloSent {
		m.helloSent = true
		f.Hello = m.cfg.Hello(m.agreed())
		if !m.helloSeen {
			return nil, true
		}
	}
	if m.waits {
		m.waits = false
		return nil, true // an empty frame says that this side waits
	}
	p := flow.Parcel{Frame: f}
	// What ends frees resources at the peer, which reads a frame's calls and descs first:
	// those that may need the resources go into the next frame.
	if len(m.calls.cancels)+len(m.calls.answers) == 0 && !slices.ContainsFunc(m.out.summaries, func(q *summary) bool { return q.frees }) {
		m.calls.addOpens(&p)
		m.out.addDescs(now, &p)
		m.out.addEnds(&p)
	}
	m.in.Add(&p)
	for len(m.calls.cancels) > 0 && p.Room(len(f.Cancels)) {
		f.Cancels = append(f.Cancels, flow.Pop(&m.calls.cancels, 0))
	}
	for len(m.failures) > 0 && p.Room(len(f.Failures)) {
		x := flow.Pop(&m.failures, 0)
		f.Failures = append(f.Failures, x)
		p.Bytes += len(x.Message) + len(x.Reason) + 64
		m.waiting -= len(x.Message)
	}
	// Otherwise the parts and a chunk might exceed a frame, or what opens a call come late.
	long := func(d frame.Desc) bool { return min(d.SizeBytes, uint64(d.ChunkBytes)) > openingBytes }
	if p.Room(0) && (len(f.Calls) == 0 || !slices.ContainsFunc(f.Descs, long)) {
		var t *out
		if t, held = m.out.next(now, &f.Chunk, 0); t != nil {
			m.calls.advance(t.call)
		}
	}
	m.addSummaries(&p)
	m.calls.addDones(&p)
	f.Drain, m.drain = m.drain, nil
	return held, !f.Empty()
}

// NextTick returns the latest time at which Tick must be called.
func (m *Machine) NextTick() Instant {
	var at Instant
	switch {
	case !m.helloSeen:
		at = m.began + m.cfg.Limits.FirstFrame
	case len(m.calls.open) > 0:
		at = m.ticked + m.tickEvery()
	default:
		at = m.lastUse + m.cfg.Limits.SessionIdle
		if m.tombstones.Len() > 0 {
			at = min(at, m.ticked+lateFrames)
		}
	}
	if m.in.LazyAt != 0 {
		at = min(at, m.in.LazyAt)
	}
	return at
}

// tickEvery returns how often the slow timers are checked while calls are open.
func (m *Machine) tickEvery() Instant {
	return max(min(tickEvery, m.cfg.Limits.ChunkIdle/8), terms.Millisecond)
}

// Tick checks all timeouts. An error ends the session.
func (m *Machine) Tick(now Instant) error {
	if now >= m.in.LazyAt {
		m.in.LazyAt = 0 // Pending includes them from now on
	}
	switch limits := &m.cfg.Limits; {
	case m.err != nil:
		return m.err
	case !m.helloSeen:
		if now >= m.began+limits.FirstFrame {
			return m.violate(frame.DeadlineExceeded, "no hello for %d s; a session opens with hello", limits.FirstFrame/terms.Second)
		}
	case len(m.calls.open) == 0:
		if now >= m.lastUse+limits.SessionIdle {
			return m.violate(frame.DeadlineExceeded, "no call for %d s; open a new session when there is one", limits.SessionIdle/terms.Second)
		}
		if now >= m.ticked+lateFrames {
			m.ticked = now
			m.tombstones = recent.IDs{}
		}
	default:
		m.lastUse = now
		if now >= m.ticked+m.tickEvery() {
			m.ticked = now
			m.SetLanes(now, m.road.Lanes, m.road.Trip) // they may have rested
			for _, k := range m.calls.inOrder() {
				m.expire(now, k)
			}
		}
	}
	return nil
}

// silent returns how long the peer has kept something waiting since last, if that is too
// long: either without a sign of life, or in spite of saying that it is waiting itself.
func (m *Machine) silent(now, last Instant) string {
	idle, most := m.cfg.Limits.ChunkIdle, m.cfg.Limits.InputIdle
	switch {
	case now < last+idle:
	case now >= m.alive+idle:
		return fmt.Sprintf("%v s", idle.Seconds())
	case now >= last+most:
		return fmt.Sprintf("%v s (serve --input-idle)", most.Seconds())
	}
	return ""
}

// expire gives up a call that has waited too long for the peer.
func (m *Machine) expire(now Instant, k *call) {
	if k.part.Stored() {
		m.expireStored(now, k)
		return
	}
	idle := m.cfg.Limits.ChunkIdle
	switch opening := m.cfg.Server && k.state == lifecycle.Opening; {
	case opening && k.timeout() > 0 && now >= k.began+k.timeout():
		m.calls.giveUp(k, frame.DeadlineExceeded, "the call's timeout passed before its inputs were announced")
	case opening && now >= k.began+idle:
		m.calls.giveUp(k, frame.DeadlineExceeded, fmt.Sprintf("call expired: %d of its inputs were not announced within %d s", k.missing, idle/terms.Second))
	}
	for _, t := range k.ins {
		if long := m.silent(now, t.last); long != "" && !t.Dead && t.Asm.Held() < t.Limit {
			m.fail(&t.Desc, k, frame.Errorf(frame.DeadlineExceeded, "tensor %s: no chunk for %s although credit is unused; send at least %d bytes a second", t.Desc.Tensor, long, terms.LeastRate))
		}
	}
	if !m.cfg.Server {
		return
	}
	for _, t := range k.outs {
		if long := m.silent(now, t.last); long != "" && t.Waits() {
			m.calls.giveUp(k, frame.DeadlineExceeded, fmt.Sprintf("call expired: nobody took result %q for %s", t.Desc.Port, long))
			return
		}
	}
}
