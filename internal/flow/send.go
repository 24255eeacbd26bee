// Package flow decides which chunks of a session's tensors move: on the sending side, whose
// chunk goes next within credit and allowance; on the receiving side, which credits and
// acknowledgements the peer is to get, and when.
//
// It refuses to know calls, and why a tensor ends: stream, its only user, does. A Sender and
// a Receiver belong to one goroutine at a time. They own no bytes: chunker and assembler
// say who does.
package flow

import (
	"slices"

	"github.com/tensorferry/tensorferry/chunker"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

// Tensor is what an incoming and an outgoing tensor have in common.
type Tensor struct {
	Desc  frame.Desc
	Geo   tensor.Geometry
	Limit uint32 // chunks below it may be sent: the last credit, or all if on allowance
	Dead  bool   // it has ended
	Share int64  // bytes of the allowance
}

// Out is an outgoing tensor.
type Out struct {
	Tensor
	Chunks    *chunker.Chunker
	Announced bool // its desc is sent
	Laned     bool // chunks were sent by the current lane
	queued    bool // in ring or small
}

// Sender decides whose chunk goes next.
type Sender struct {
	Laned     bool  // chunks on credit leave by a lane
	Allowance int64 // bytes of the peer's allowance in use

	ring     []*Out // tensors on credit with chunks to send, which take turns
	turn     int    // index in ring
	small    []*Out // tensors on allowance with chunks to send, which precede the ring
	smallRun int    // chunks taken from small since the last one from ring
}

// Start sends a tensor whose desc is sent next: without credit if it needs none, or if it
// has room in the peer's allowance.
func (s *Sender) Start(t *Out, free bool, allowance int64) {
	t.Announced = true
	switch n := t.Geo.Count(); {
	case free:
		t.Limit = n
	case !t.Desc.Held && t.Geo.Size <= allowance-s.Allowance && n <= frame.AllowanceChunks:
		t.Desc.OnAllowance = true
		t.Limit, t.Share = n, t.Geo.Size
		s.Allowance += t.Share
	}
	s.Queue(t)
}

// End ends a tensor. Its memory returns to its owner.
func (s *Sender) End(t *Out) {
	t.Dead = true
	t.Chunks.Close()
	s.Allowance -= t.Share
	t.Share = 0
}

// Credit raises a tensor's limit. It reports whether it was lower.
func (s *Sender) Credit(t *Out, limit uint32) bool {
	limit = min(limit, t.Geo.Count())
	if limit <= t.Limit {
		return false
	}
	t.Limit = limit
	s.Queue(t)
	return true
}

// Acknowledge handles an acknowledgement. It reports whether it says anything new.
func (s *Sender) Acknowledge(t *Out, p frame.Ack) (news bool, err error) {
	before := t.Chunks.Below()
	if err := t.Chunks.Ack(p.Below); err != nil {
		return false, err
	}
	for _, i := range p.Resend {
		if err := t.Chunks.Resend(i); err != nil {
			return false, err
		}
	}
	s.Queue(t)
	return t.Chunks.Below() > before, nil
}

// Rewind has what was sent by a lane, and is not acknowledged, sent again.
func (s *Sender) Rewind(t *Out) {
	t.Laned = false
	t.Chunks.Rewind()
	s.Queue(t)
}

// Queue adds a tensor to those that take turns, if it has something to send.
func (s *Sender) Queue(t *Out) {
	if t.queued || t.Dead || !t.Announced || !t.Chunks.Ready(t.Limit) {
		return
	}
	t.queued = true
	if t.Desc.OnAllowance {
		s.small = append(s.small, t)
	} else {
		s.ring = append(s.ring, t)
	}
}

// Waits reports whether a tensor waits for the peer: for credit, or for an acknowledgement,
// which is due soon after a chunk if the sender cannot retain all chunks. Otherwise it
// waits for this side to produce it.
func (t *Out) Waits() bool {
	return t.Announced && (t.Chunks.Ready(^uint32(0)) || t.Chunks.Sent() ||
		t.Desc.RetainChunks > 0 && t.Chunks.Unacked() > 0)
}

// Ready reports whether there may be a chunk to leave by the session, or by a lane.
func (s *Sender) Ready(lane bool) bool {
	return len(s.small) > 0 && !lane || len(s.ring) > 0 && s.Laned == lane
}

// Next takes the next chunk to leave by the session, or by a lane, and returns its tensor;
// nil if there is none. The views in ch are shared until held is released. again is true if
// the chunk was sent before.
func (s *Sender) Next(ch *frame.Chunk, lane bool) (t *Out, again bool, held chunker.Releaser) {
	for t == nil && s.Ready(lane) {
		if small := len(s.small) > 0 && !lane; small && (s.smallRun < smallRun || len(s.ring) == 0 || s.Laned) {
			s.smallRun++
			t, again, held = s.take(&s.small, ch)
		} else {
			s.smallRun = 0
			t, again, held = s.take(&s.ring, ch)
		}
	}
	return t, again, held
}

// take takes the next chunk from a queue; nil if the queue is empty afterwards.
func (s *Sender) take(q *[]*Out, ch *frame.Chunk) (*Out, bool, chunker.Releaser) {
	for len(*q) > 0 {
		i := 0
		if q == &s.ring {
			s.turn %= len(s.ring)
			i = s.turn
		}
		t, index, ok := (*q)[i], uint32(0), false
		again := t.Chunks.Again(t.Limit)
		if !t.Dead {
			index, ok = t.Chunks.Take(t.Limit)
		}
		switch {
		case !ok || !t.Chunks.Ready(t.Limit):
			Pop(q, i)
			t.queued = false
		case q == &s.ring:
			s.turn++ // its next chunk waits for the next turn
		}
		if ok {
			var held chunker.Releaser
			t.Laned = t.Laned || s.Laned && q == &s.ring
			ch.Tensor, ch.Index = t.Desc.Tensor, index
			ch.Data, held = t.Chunks.View(index, ch.Data[:0])
			return t, again, held
		}
	}
	return nil, false, nil
}

// Parcel is a frame that is being filled.
type Parcel struct {
	*frame.Frame
	Bytes int // of its control parts, except those of a fixed size
}

// Room reports whether another part may be added, given how many of its kind there are.
func (p *Parcel) Room(parts int) bool { return parts < FrameParts && p.Bytes < FrameBytes }

// Pop removes and returns the i-th element of a queue. It frees a long queue that has
// become empty.
func Pop[T any](q *[]T, i int) T {
	v := (*q)[i]
	if *q = slices.Delete(*q, i, i+1); len(*q) == 0 && cap(*q) > RetainedQueue {
		*q = nil
	}
	return v
}
