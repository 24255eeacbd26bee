// Package flow decides which chunks of a session's tensors move: on the sending side, whose
// chunk goes next within credit and allowance; on the receiving side, which credits and
// acknowledgements the peer is to get, and when.
//
// It refuses to know calls, and why a tensor ends: stream, its only user, does. A Sender and
// a Receiver belong to one goroutine at a time. They own no bytes: chunker and assembler
// say who does.
package flow

import (
	"errors"
	"slices"

	"github.com/tensorferry/tensorferry/chunker"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
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
	Announced bool      // its desc is sent
	Gradual   bool      // it travels on credit: on allowance, its receiver might wait for all of it
	laned     []passage // chunks that lanes carry, in the order in which they were sent
	queued    bool      // in ring or small
}

// passage is a chunk on its way by a lane: it was sent, and is not acknowledged.
type passage struct {
	index uint32
	lane  uint8
	since terms.Instant
}

// Sender decides whose chunk goes next.
type Sender struct {
	Laned     bool  // chunks on credit leave by lanes
	Allowance int64 // bytes of the peer's allowance in use

	ring     []*Out // tensors on credit with chunks to send, which take turns
	turn     int    // index in ring
	small    []*Out // tensors on allowance with chunks to send, which precede the ring
	smallRun int    // chunks taken from small since the last one from ring

	moved []terms.Instant // per lane: when a chunk that it carried was last acknowledged
}

// Start sends a tensor whose desc is sent next: without credit if it needs none, or if it
// has room in the peer's allowance.
func (s *Sender) Start(t *Out, free bool, allowance int64) {
	t.Announced = true
	switch n := t.Geo.Count(); {
	case free:
		t.Limit = n
	case !t.Desc.Held && !t.Gradual && t.Geo.Size <= allowance-s.Allowance && n <= frame.AllowanceChunks:
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
func (s *Sender) Acknowledge(now terms.Instant, t *Out, p frame.Ack) (news bool, err error) {
	if problem := p.Check(); problem != "" {
		return false, errors.New(problem)
	}
	if news, err = t.Chunks.Ack(p.Below, p.Beyond); err != nil {
		return false, err
	}
	for _, i := range p.Resend {
		if err := t.Chunks.Resend(i); err != nil {
			return false, err
		}
	}
	if news && len(t.laned) > 0 {
		t.laned = slices.DeleteFunc(t.laned, func(p passage) bool {
			has := t.Chunks.Has(p.index)
			if has {
				s.moved[p.lane] = now
			}
			return has
		})
	}
	s.Queue(t)
	return news, nil
}

// Lose has what a lane carries, or if that is 0 all lanes, sent again.
func (s *Sender) Lose(t *Out, lane uint8) {
	t.laned = slices.DeleteFunc(t.laned, func(p passage) bool {
		lost := lane == 0 || p.lane == lane
		if lost {
			t.Chunks.Lose(p.index)
		}
		return lost
	})
	s.Queue(t)
}

// Late returns a lane that has made no progress with a chunk of a tensor for longer than
// patience, or 0.
func (s *Sender) Late(now terms.Instant, t *Out, patience terms.Instant) uint8 {
	if len(t.laned) == 0 || t.Desc.RetainChunks == 0 { // no acknowledgement is due
		return 0
	}
	for _, p := range t.laned {
		if now >= max(p.since, s.moved[p.lane])+patience {
			return p.lane
		}
	}
	return 0
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
		t.Desc.RetainChunks > 0 && t.Chunks.Unacked())
}

// Ready reports whether there may be a chunk to leave by the session, or by a lane.
func (s *Sender) Ready(lane bool) bool {
	return len(s.small) > 0 && !lane || len(s.ring) > 0 && s.Laned == lane
}

// Next takes the next chunk to leave by a lane, or by the session if that is 0, and returns
// its tensor; nil if there is none. The views in ch are shared until held is released. again
// is true if the chunk was sent before.
func (s *Sender) Next(now terms.Instant, ch *frame.Chunk, lane uint8) (t *Out, again bool, held chunker.Releaser) {
	for t == nil && s.Ready(lane > 0) {
		if small := len(s.small) > 0 && lane == 0; small && (s.smallRun < smallRun || len(s.ring) == 0 || s.Laned) {
			s.smallRun++
			t, again, held = s.take(&s.small, ch)
		} else {
			s.smallRun = 0
			t, again, held = s.take(&s.ring, ch)
		}
	}
	if t != nil && lane > 0 {
		if again { // by another way than this one
			t.laned = slices.DeleteFunc(t.laned, func(p passage) bool { return p.index == ch.Index })
		}
		for len(s.moved) <= int(lane) {
			s.moved = append(s.moved, 0)
		}
		t.laned = append(t.laned, passage{ch.Index, lane, now})
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
			ch.Tensor, ch.Index, ch.Codec = t.Desc.Tensor, index, 0
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
func (p *Parcel) Room(parts int) bool { return parts < frameParts && p.Bytes < FrameBytes }

// Pop removes and returns the i-th element of a queue. It frees a long queue that has
// become empty.
func Pop[T any](q *[]T, i int) T {
	v := (*q)[i]
	if *q = slices.Delete(*q, i, i+1); len(*q) == 0 && cap(*q) > frame.KeptParts {
		*q = nil
	}
	return v
}
