package stream

import (
	"io"

	"github.com/tensorferry/tensorferry/chunker"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
)

// A lane is a connection beside the session that carries chunks of tensors on credit, and
// nothing else. Each of them has its place at the receiver, so that it does not matter in
// what order they come, or by which way.

// agreed reports whether lanes may be opened.
func (m *Machine) agreed() bool { return m.cfg.Lanes > 0 && m.peer.Lanes > 0 }

// OfferLanes (server) offers what opens lanes, so many times. It comes before the peer's
// hello.
func (m *Machine) OfferLanes(token frame.LaneToken, times uint32) {
	m.token, m.cfg.Lanes = token, times
}

// LaneOffer (client) returns what opens lanes, and how often; a zero token if the server
// offers none.
func (m *Machine) LaneOffer() (token frame.LaneToken, times int) {
	if !m.agreed() {
		return frame.LaneToken{}, 0
	}
	return m.peer.LaneToken, int(min(m.peer.Lanes, 1<<16))
}

// SetLane says whether there is a lane. Chunks on credit leave by NextLane from then on; or
// by Next, those once more that went by the lane and are not acknowledged. There is none
// for a side that encodes its chunks, nor once the peer has sent its last frame.
func (m *Machine) SetLane(open bool) {
	s := &m.out
	s.laned = open && m.agreed() && m.code == codec.None && !m.peerDone && !m.shut
	if s.laned {
		return
	}
	for _, k := range m.calls.inOrder() {
		for _, t := range k.outs {
			if t.laned && !t.dead {
				t.laned = false
				t.chunks.Rewind()
				s.queue(t)
			}
		}
	}
}

// LanePending reports whether NextLane has a chunk now.
func (m *Machine) LanePending() bool { return m.out.laned && len(m.out.ring) > 0 && !m.shut }

// NextLane fills ch with the next chunk for the lane. Its views are shared until held is
// released; the checksum is for the caller.
func (m *Machine) NextLane(now Instant, ch *frame.Chunk) (held chunker.Releaser, ok bool) {
	if !m.LanePending() {
		return nil, false
	}
	t, held := m.out.take(now, &m.out.ring, ch)
	if t == nil {
		return nil, false
	}
	t.laned = true
	m.stats.LaneBytesOut += int64(ch.Len())
	m.calls.advance(t.call)
	return held, true
}

// LaneStalled reports whether chunks have gone that the peer should have acknowledged by
// now: the lane may have lost them.
func (m *Machine) LaneStalled(now Instant) bool {
	if !m.out.laned {
		return false
	}
	last, chunk := Instant(0), uint32(0) // the last that was heard of all; the largest that is due
	for _, t := range m.out.tensors {
		if t.laned {
			last = max(last, t.last)
			if t.desc.RetainChunks > 0 && t.chunks.Unacked() > 0 {
				chunk = max(chunk, t.desc.ChunkBytes)
			}
		}
	}
	return chunk > 0 && now >= last+LanePatience(int(chunk))
}

// LanePatience is how long a lane may take for n bytes of a chunk, and then for their
// acknowledgement.
func LanePatience(n int) Instant { return laneStall * Instant(1+n/mib) }

// ClaimLane decides about a chunk of n bytes, whose header came by a lane. With true, the
// caller fills the place by c.Fill, outside any lock it likes, and calls Commit, or Abort
// if that failed. With false, the bytes are of no use: a lane outlives the tensors that
// it brings chunks of, and a chunk that is here, or on its way, is not compared.
func (m *Machine) ClaimLane(now Instant, ch *frame.Chunk, n int, c *Claim) bool {
	t := m.in.tensors[ch.Tensor]
	if m.err != nil || m.shut || t == nil {
		return false
	}
	if t.desc.OnAllowance {
		m.fail(ch.Tensor, t.call, frame.Errorf(frame.InvalidArgument, "tensor %s: chunk %d of a tensor on allowance came by a lane; send it in the session", ch.Tensor, ch.Index))
		return false
	}
	if !m.claim(now, t, ch, n, c) {
		return false
	}
	if c.claim.Again() {
		c.tensor = nil
		t.call.claims--
		t.asm.Abort(&c.claim)
		return false
	}
	c.lane = true
	return true
}

// Abort ends a claim whose bytes did not come. The chunk is asked for again.
func (m *Machine) Abort(now Instant, c *Claim) {
	t, index := c.tensor, c.claim.Index()
	c.tensor = nil
	t.call.claims--
	t.asm.Abort(&c.claim)
	if t.dead {
		m.calls.advance(t.call)
		return
	}
	t.resend = append(t.resend, index) // a session has few lanes to break
	m.in.wantAck(now, t, true)
}

// Fill is that of assembler.Claim: it reads the bytes of a claim of ClaimLane to their
// place. It may run beside the machine.
func (c *Claim) Fill(r io.Reader) (got uint32, left int, err error) { return c.claim.Fill(r) }

// Dead reports whether nobody waits for the chunk of a claim any more, but for the end of
// the claim: its memory returns with that.
func (c *Claim) Dead() bool { return c.tensor != nil && c.tensor.dead }
