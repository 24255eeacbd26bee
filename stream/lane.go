package stream

import (
	"io"

	"github.com/tensorferry/tensorferry/chunker"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
)

// A lane is a connection next to the session that carries only chunks of tensors on credit.
// Each chunk has its place at the receiver, so neither the order of the chunks nor the
// route by which they arrive matters.

// agreed reports whether lanes may be opened.
func (m *Machine) agreed() bool { return m.cfg.Lanes > 0 && m.peer.Lanes > 0 }

// OfferLanes (server) offers a token that opens lanes, as many as times. It must be called
// before the peer's hello arrives.
func (m *Machine) OfferLanes(token frame.LaneToken, times uint32) {
	m.cfg.LaneToken, m.cfg.Lanes = token, times
}

// LaneOffer (client) returns the token that opens lanes, and how often it may be used; a
// zero token if the server offers none.
func (m *Machine) LaneOffer() (token frame.LaneToken, times uint32) {
	if !m.agreed() {
		return frame.LaneToken{}, 0
	}
	return m.peer.LaneToken, m.peer.Lanes
}

// SetLane sets whether there is a lane. While there is, chunks on credit leave by NextLane;
// otherwise by Next, which also repeats those that left by the lane and are not
// acknowledged. A side that encodes its chunks has no lane, nor does one whose peer has
// sent its last frame.
func (m *Machine) SetLane(now Instant, open bool) {
	s := &m.out
	s.Laned = open && m.agreed() && m.code == codec.None && !m.peerDone && !m.shut
	if s.Laned {
		return
	}
	for _, k := range m.calls.inOrder() {
		for _, t := range k.outs {
			if t.Laned {
				t.last = now
				s.Rewind(&t.Out)
			}
		}
	}
}

// LanePending reports whether NextLane has a chunk now.
func (m *Machine) LanePending() bool { return m.out.Ready(true) && !m.shut }

// NextLane fills ch with the next chunk for the lane. Its views are shared until held is
// released; the caller computes the checksum.
func (m *Machine) NextLane(now Instant, ch *frame.Chunk) (held chunker.Releaser, ok bool) {
	if !m.LanePending() {
		return nil, false
	}
	t, held := m.out.next(now, ch, true)
	if t == nil {
		return nil, false
	}
	m.stats.LaneBytesOut += int64(ch.Len())
	m.calls.advance(t.call)
	return held, true
}

// LaneStalled reports whether the peer should by now have acknowledged chunks that were
// sent: the lane may have lost them.
func (m *Machine) LaneStalled(now Instant) bool {
	if !m.out.Laned {
		return false
	}
	last, chunk := Instant(0), uint32(0) // last progress of any tensor; largest chunk size due
	for _, t := range m.out.tensors {
		if t.Laned {
			last = max(last, t.last)
			if t.Desc.RetainChunks > 0 && t.Chunks.Unacked() > 0 {
				chunk = max(chunk, t.Desc.ChunkBytes)
			}
		}
	}
	return chunk > 0 && now >= last+m.LanePatience(int(chunk))
}

// LanePatience returns how long a lane may take for n bytes of a chunk and their
// acknowledgement: at most half of what the server waits for a chunk, so that they can still
// be sent by another path. It may run concurrently with the machine once the peer's hello
// has arrived.
func (m *Machine) LanePatience(n int) Instant {
	idle := m.cfg.Limits.ChunkIdle
	if told := m.peer.ChunkIdleMillis; !m.cfg.Server && told > 0 {
		idle = Instant(told) * millisecond
	}
	return min(laneStall*Instant(1+n/mib), idle/2)
}

// ClaimLane decides whether to accept a chunk of n bytes whose header arrived by a lane. If
// it returns true, the caller calls c.Fill, outside any lock, and then Commit, or Abort if
// Fill failed. If it returns false, the caller discards the bytes: a lane outlives the
// tensors whose chunks it carries, and a chunk that is already here or being received is
// not compared.
func (m *Machine) ClaimLane(now Instant, ch *frame.Chunk, n int, c *Claim) bool {
	t := m.in.tensors[ch.Tensor]
	if m.err != nil || m.shut || t == nil {
		return false
	}
	if t.Desc.OnAllowance {
		m.fail(&t.Desc, t.call, frame.Errorf(frame.InvalidArgument, "tensor %s: chunk %d of a tensor on allowance arrived by a lane; send it in the session", ch.Tensor, ch.Index))
		return false
	}
	if !m.claim(now, t, ch, n, c) {
		return false
	}
	if c.claim.Again() {
		c.tensor = nil
		t.call.claims--
		t.Asm.Abort(&c.claim)
		return false
	}
	c.lane = true
	return true
}

// Abort ends a claim whose bytes did not arrive. The chunk is requested again.
func (m *Machine) Abort(now Instant, c *Claim) {
	t, index := c.tensor, c.claim.Index()
	c.tensor = nil
	t.call.claims--
	t.Asm.Abort(&c.claim)
	if t.Dead {
		m.calls.advance(t.call)
		return
	}
	m.in.Resend(now, &t.In, index) // they are few: a session has few lanes to lose
}

// Fill reads the bytes of a claim of ClaimLane to their place, as assembler.Claim.Fill
// does. It may run concurrently with the machine.
func (c *Claim) Fill(r io.Reader) (got uint32, left int, err error) { return c.claim.Fill(r) }

// Dead reports whether a claim's chunk is no longer wanted: only the return of its memory
// waits for the end of the claim.
func (c *Claim) Dead() bool { return c.tensor != nil && c.tensor.Dead }
