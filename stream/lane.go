package stream

import (
	"github.com/tensorferry/tensorferry/chunker"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
)

// A lane is a connection next to the session that carries only chunks of tensors on credit.
// Each chunk has its place at the receiver, so neither the order of the chunks nor the
// route by which they arrive matters.

// agreed reports whether lanes may be opened.
func (m *Machine) agreed() bool { return m.cfg.Lanes > 0 && m.peer.Lanes > 0 }

// OfferLanes (server) offers a token that opens lanes, as many as times, and atOnce at a
// time. It must be called before the peer's hello arrives.
func (m *Machine) OfferLanes(token frame.LaneToken, times, atOnce uint32) {
	m.cfg.LaneToken, m.cfg.Lanes, m.cfg.LanesAtOnce = token, times, atOnce
}

// LaneOffer (client) returns the token that opens lanes, and how often it may be used; a
// zero token if the server offers none.
func (m *Machine) LaneOffer() (token frame.LaneToken, times uint32) {
	if !m.agreed() {
		return frame.LaneToken{}, 0
	}
	return m.peer.LaneToken, m.peer.Lanes
}

// LanesAtOnce returns how many lanes the session may have at a time, if it may have any.
func (m *Machine) LanesAtOnce() int { return int(max(1, min(m.cfg.LanesAtOnce, m.peer.LanesAtOnce))) }

// SetLanes sets how many lanes there are, and their least round trip, 0 if that is short or
// not known. While there are lanes, chunks on credit leave by NextLane. A side whose peer has
// sent its last frame has none, nor has one that encodes, if its peer knows only one.
func (m *Machine) SetLanes(now Instant, n int, trip Instant) {
	m.road.Lanes, m.road.Trip = n, trip
	m.out.Laned = n > 0 && !m.road.Rests(now) && m.agreed() && (m.code == codec.None || m.peer.LanesAtOnce > 0) && !m.peerDone && !m.shut
}

// RestLanes has this side send all chunks in the session for a while, from SetLanes on.
func (m *Machine) RestLanes(now Instant) { m.road.Rest(now) }

// Ahead returns how many bytes of a tensor to lend, or to offer, ahead of what has moved; 0 if
// the peer is near.
func (m *Machine) Ahead(now Instant) int64 {
	return m.road.Ahead(now, m.stats.BytesIn+m.stats.BytesOut)
}

// LoseLane has the chunks that a lane carries, and that are not acknowledged, sent again: the
// lane has ended. Lane 0 is all of them.
func (m *Machine) LoseLane(lane uint8) {
	for _, k := range m.calls.inOrder() {
		for _, t := range k.outs {
			m.out.Lose(&t.Out, lane)
		}
	}
}

// LanePending reports whether NextLane has a chunk now.
func (m *Machine) LanePending() bool { return m.out.Ready(true) && !m.shut }

// LanesBusy reports whether lanes have something to carry: a chunk waits for one, or the peer
// may send chunks by one.
func (m *Machine) LanesBusy() bool {
	busy := m.LanePending()
	for _, t := range m.in.tensors {
		busy = busy || !t.Desc.OnAllowance && t.Asm.Held() < t.Limit
	}
	return busy
}

// NextLane fills ch with the next chunk for a lane, which has a number from 1 on. Its views
// are shared until held is released; the caller encodes it with Status.Codec, if that pays
// off, and computes the checksum.
func (m *Machine) NextLane(now Instant, ch *frame.Chunk, lane uint8) (held chunker.Releaser, ok bool) {
	if !m.LanePending() {
		return nil, false
	}
	t, held := m.out.next(now, ch, lane)
	if t == nil {
		return nil, false
	}
	m.stats.LaneBytesOut += int64(ch.Len())
	m.calls.advance(t.call)
	return held, true
}

// LaneStalled returns a lane of which the peer should by now have acknowledged a chunk: it
// may have lost it. It returns 0 if there is none.
func (m *Machine) LaneStalled(now Instant) uint8 {
	for _, t := range m.out.tensors {
		patience := m.LanePatience(int(t.Desc.ChunkBytes))
		if t.summed && t.Chunks.Below() == t.Geo.Count()-1 { // the peer checks the digest before it acknowledges the last chunk
			patience = m.cfg.Limits.ChunkIdle / 2
		}
		if lane := m.out.Late(now, &t.Out, patience); lane != 0 {
			return lane
		}
	}
	return 0
}

// LanePatience returns how long a lane may take for n bytes of a chunk and their
// acknowledgement: at most half of what the server waits for a chunk, so that they can still
// be sent by another path. It may run concurrently with the machine once the peer's hello
// has arrived.
func (m *Machine) LanePatience(n int) Instant { return m.cfg.LanePatience(m.peer.ChunkIdleMillis, n) }

// ClaimLane decides whether to accept a chunk of n bytes whose header arrived by a lane. If
// it returns true, the caller calls c.Fill and c.Decode, outside any lock, and then Commit, or
// Abort if Fill failed. If it returns false, the caller discards the bytes: a lane outlives the
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
	if c.Again() {
		c.end()
		t.Asm.Abort(&c.Claim)
		return false
	}
	c.lane = true
	return true
}

// Abort ends a claim whose bytes did not arrive. The chunk is requested again.
func (m *Machine) Abort(now Instant, c *Claim) {
	t, index := c.end(), c.Index()
	t.Asm.Abort(&c.Claim)
	if t.Dead {
		m.calls.advance(t.call)
		return
	}
	m.in.Resend(now, &t.In, index) // they are few: a session has few lanes to lose
}

// Dead reports whether a claim's chunk is no longer wanted: only the return of its memory
// waits for the end of the claim.
func (c *Claim) Dead() bool { return c.tensor != nil && c.tensor.Dead }
