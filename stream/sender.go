package stream

import (
	"errors"
	"fmt"
	"slices"

	"github.com/tensorferry/tensorferry/chunker"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/lifecycle"
	"github.com/tensorferry/tensorferry/tensor"
)

// Errors of OpenCall, OpenTensor, Offer and Lend.
var (
	// ErrClosed is returned when the session, call or tensor is over.
	ErrClosed = errors.New("stream: closed")
	// ErrDraining is returned when a side opens nothing new.
	ErrDraining = errors.New("stream: draining")
)

// sender sends this side's tensors, within credit and allowance, taking turns.
type sender struct {
	*shared
	tensors   map[tensor.ID]*out
	descs     []*out     // to be sent
	ring      []*out     // tensors on credit with chunks to send, which take turns
	turn      int        // index in ring
	small     []*out     // tensors on allowance with chunks to send, which precede the ring
	smallRun  int        // chunks taken from small since the last one from ring
	laned     bool       // chunks of the ring leave by NextLane
	announced int        // number of tensors that the peer counts as open
	ending    []*call    // client: puts whose end is to be sent
	summaries []*summary // server: to be sent
	allowance int64      // bytes of the peer's allowance in use
}

// out is an outgoing tensor.
type out struct {
	desc      frame.Desc
	geo       tensor.Geometry
	chunks    *chunker.Chunker
	call      *call
	limit     uint32
	announced bool
	queued    bool // in ring or small
	laned     bool // chunks were sent by the current lane
	dead      bool
	share     int64 // bytes of the allowance
	last      Instant
	summary   *summary     // server: to be sent after the chunks
	summed    bool         // server: it was
	failed    *frame.Error // client: why it was given up before it was announced
}

// touch records progress.
func (t *out) touch(now Instant) { t.last, t.call.last = now, now }

// OpenTensor announces an outgoing tensor of an open call: an input on the
// client, a result on the server. SizeBytes and OnAllowance are filled in here.
func (m *Machine) OpenTensor(now Instant, d frame.Desc) error {
	k, s := m.calls.open[d.Call], &m.out
	if k == nil || k.state >= lifecycle.Finishing {
		return ErrClosed
	}
	if m.calls.used(d.Tensor) {
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
	if d.RetainChunks == 0 && m.agreed() {
		d.RetainChunks = laneRetain
	}
	t := &out{desc: d, geo: geo, chunks: chunker.New(geo), call: k, last: now}
	s.tensors[d.Tensor] = t
	s.most = max(s.most, len(s.tensors))
	k.outs = append(k.outs, t)
	k.last = now
	if k.part.Put != nil {
		k.tensors++
	}
	if m.cfg.Server || k.state == lifecycle.Running { // otherwise they are sent with the call
		s.descs = append(s.descs, t)
	}
	return nil
}

// Offer shares data as bytes [off, off+len) of an outgoing tensor until release, which is
// called once, on any goroutine. After an error it is never called.
func (m *Machine) Offer(now Instant, id tensor.ID, off int64, data []byte, release func()) error {
	t := m.out.tensors[id]
	if t == nil {
		return ErrClosed
	}
	waiting := t.chunks.Ready(^uint32(0))
	if err := t.chunks.Offer(off, data, release); err != nil {
		return err
	}
	if !waiting {
		t.touch(now)
	}
	m.out.queue(t)
	return nil
}

// drop gives up a tensor. Its memory returns to its owner.
func (s *sender) drop(t *out) {
	if t.dead {
		return
	}
	t.dead = true
	t.chunks.Close()
	delete(s.tensors, t.desc.Tensor)
	s.tombstones.Add(t.desc.Tensor)
	s.allowance -= t.share
	t.share = 0
	if t.announced {
		s.announced--
	}
	if k := t.call; k.stored() {
		k.outs = slices.DeleteFunc(k.outs, func(o *out) bool { return o == t })
		if t.announced {
			s.put(k, -1)
		}
		s.settle(t)
	}
}

// put (client) counts n more tensors of a put as announced.
func (s *sender) put(k *call, n int) {
	before := k.weight()
	if k.part.Put != nil {
		k.putting += n
	}
	if !s.cfg.Server && (k.state == lifecycle.Running || k.state == lifecycle.Finishing) {
		s.inFlight += k.weight() - before
	}
}

// credit raises a tensor's limit.
func (s *sender) credit(now Instant, t *out, limit uint32) {
	if limit = min(limit, t.geo.Count()); limit > t.limit {
		t.limit = limit
		t.touch(now)
		s.queue(t)
	}
}

// acknowledge handles an acknowledgement of a tensor.
func (s *sender) acknowledge(now Instant, t *out, p frame.Ack) error {
	before := t.chunks.Below()
	err := t.chunks.Ack(p.Below)
	for _, i := range p.Resend {
		if err == nil {
			err = t.chunks.Resend(i)
		}
	}
	if err != nil {
		return err
	}
	if t.chunks.Below() > before { // an ack without news is no progress
		t.touch(now)
	}
	s.queue(t)
	if t.chunks.Acked() && t.call.part.Put == nil { // a put's Summary ends it
		s.drop(t)
	}
	return nil
}

// queue adds a tensor to those that take turns, if it has something to send.
func (s *sender) queue(t *out) {
	if t.queued || t.dead || !t.announced || !t.chunks.Ready(t.limit) {
		return
	}
	t.queued = true
	if t.desc.OnAllowance {
		s.small = append(s.small, t)
	} else {
		s.ring = append(s.ring, t)
	}
}

// waits reports whether a tensor waits for the peer: for credit, or for an acknowledgement,
// which is due soon after a chunk if the sender cannot retain all chunks. Otherwise it
// waits for this side to produce it.
func (t *out) waits() bool {
	return t.announced && (t.chunks.Ready(^uint32(0)) || t.chunks.Sent() ||
		t.desc.RetainChunks > 0 && t.chunks.Unacked() > 0)
}

// mayAnnounce returns the index of the next desc that may be sent, or -1. Results and
// tensors of puts wait here while they would exceed what the peer keeps open; inputs have
// waited with their call.
func (s *sender) mayAnnounce() int {
	return slices.IndexFunc(s.descs, func(t *out) bool {
		switch k := t.call; {
		case t.dead:
			return true
		case s.cfg.Server:
			return s.announced < int(s.peer.MaxOpenTensors)
		default:
			return k.part.Put == nil || k.putting == 0 || s.inFlight < int(s.peer.MaxOpenTensors)
		}
	})
}

func (s *sender) addDescs(now Instant, p *parcel) {
	for i := s.mayAnnounce(); i >= 0 && p.room(len(p.Descs)); i = s.mayAnnounce() {
		t := pop(&s.descs, i)
		if t.dead {
			continue
		}
		t.announced = true
		t.touch(now)
		s.announced++
		s.put(t.call, 1)
		if t.failed != nil {
			s.sayFailed(t.desc.Tensor, t.failed.Code, t.failed.Text)
		}
		if s.cfg.OneWay {
			t.limit = t.geo.Count()
		} else if !t.desc.Held && t.geo.Size <= int64(s.peer.AllowanceBytes)-s.allowance && t.geo.Count() <= frame.AllowanceChunks {
			t.desc.OnAllowance = true
			t.limit, t.share = t.geo.Count(), t.geo.Size
			s.allowance += t.share
		}
		p.Descs = append(p.Descs, t.desc)
		p.bytes += t.desc.Cost()
		s.queue(t)
		s.settle(t)
	}
}

// addChunk adds the next chunk of the tensor whose turn it is, and returns the tensor; nil
// if no chunk is ready.
func (s *sender) addChunk(now Instant, p *parcel) (*out, chunker.Releaser) {
	for {
		ring := len(s.ring) > 0 && !s.laned
		if len(s.small) == 0 && !ring {
			return nil, nil
		}
		q := &s.small
		if len(s.small) > 0 && (!ring || s.smallRun < smallRun) {
			s.smallRun++
		} else {
			s.smallRun = 0
			q = &s.ring
		}
		if t, held := s.take(now, q, &p.Chunk); t != nil {
			return t, held
		}
	}
}

// take takes the next chunk from a queue that is not empty, and returns its tensor; nil if
// the queue is empty afterwards.
func (s *sender) take(now Instant, q *[]*out, ch *frame.Chunk) (*out, chunker.Releaser) {
	for len(*q) > 0 {
		i := 0
		if q == &s.ring {
			s.turn %= len(s.ring)
			i = s.turn
		}
		t, index, ok := (*q)[i], uint32(0), false
		again := t.chunks.Again(t.limit)
		if !t.dead {
			index, ok = t.chunks.Take(t.limit)
		}
		switch {
		case !ok || !t.chunks.Ready(t.limit):
			pop(q, i)
			t.queued = false
		case q == &s.ring:
			s.turn++ // its next chunk waits for the next turn
		}
		if !ok {
			continue
		}
		var held chunker.Releaser
		ch.Tensor, ch.Index = t.desc.Tensor, index
		ch.Data, held = t.chunks.View(index, ch.Data[:0])
		if !again { // otherwise a peer could keep the tensor forever by asking for the same chunk
			t.touch(now)
		}
		s.stats.ChunksOut++
		s.stats.BytesOut += int64(ch.Len())
		if s.peerDone {
			t.chunks.AckSent()
		}
		s.settle(t)
		return t, held
	}
	return nil, nil
}
