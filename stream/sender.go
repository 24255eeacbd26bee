package stream

import (
	"errors"
	"fmt"
	"slices"

	"github.com/tensorferry/tensorferry/chunker"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/flow"
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
	flow.Sender
	tensors   map[tensor.ID]*out
	descs     []*out     // to be sent
	ending    []*call    // client: puts whose end is to be sent
	summaries []*summary // server: to be sent
}

// out is an outgoing tensor.
type out struct {
	flow.Out
	transfer
	summary *summary     // server: to be sent after the chunks
	summed  bool         // server: it was
	failed  *frame.Error // client: why it was given up before it was announced
}

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
	gradual := !m.cfg.Server && k.part.Put == nil && d.RetainChunks > 0 && geo.Count() > 1
	if d.RetainChunks == 0 && m.agreed() {
		d.RetainChunks = laneRetain
	}
	t := &out{transfer: transfer{call: k, last: now}, Out: flow.Out{Tensor: flow.Tensor{Desc: d, Geo: geo}, Chunks: chunker.New(geo), Gradual: gradual}}
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
	waiting := t.Chunks.Ready(^uint32(0))
	if err := t.Chunks.Offer(off, data, release); err != nil {
		return err
	}
	if !waiting {
		t.touch(now)
	}
	m.out.Queue(&t.Out)
	return nil
}

// drop gives up a tensor. Its memory returns to its owner.
func (s *sender) drop(t *out) {
	if t.Dead {
		return
	}
	s.End(&t.Out)
	delete(s.tensors, t.Desc.Tensor)
	s.tombstones.Add(t.Desc.Tensor)
	t.call.outs = slices.DeleteFunc(t.call.outs, func(o *out) bool { return o == t })
	if t.Announced {
		s.count(t.call, -1)
	}
	s.settle(t)
}

// count counts n more tensors of a call as announced.
func (s *sender) count(k *call, n int) {
	before := k.weight()
	if k.part.Put != nil {
		k.putting += n
	}
	switch {
	case s.cfg.Server:
		s.inFlight += n
	case k.state == lifecycle.Running || k.state == lifecycle.Finishing:
		s.inFlight += k.weight() - before
	}
}

// mayAnnounce returns the index of the next desc that may be sent, or -1. Results and
// tensors of puts wait here while they would exceed what the peer keeps open; inputs have
// waited with their call.
func (s *sender) mayAnnounce() int {
	return slices.IndexFunc(s.descs, func(t *out) bool {
		waited := !s.cfg.Server && (t.call.part.Put == nil || t.call.putting == 0)
		return t.Dead || waited || s.inFlight < int(s.peer.MaxOpenTensors)
	})
}

func (s *sender) addDescs(now Instant, p *flow.Parcel) {
	for i := s.mayAnnounce(); i >= 0 && p.Room(len(p.Descs)); i = s.mayAnnounce() {
		t := flow.Pop(&s.descs, i)
		if t.Dead {
			continue
		}
		s.Start(&t.Out, s.cfg.OneWay, int64(s.peer.AllowanceBytes))
		t.touch(now)
		s.count(t.call, 1)
		if t.failed != nil {
			s.sayFailed(t.Desc.Tensor, t.failed)
		}
		p.Descs = append(p.Descs, t.Desc)
		p.Bytes += t.Desc.Cost()
		s.settle(t)
	}
}

// next fills ch with the next chunk that leaves by a lane, or by the session if that is 0. It
// returns the chunk's tensor; nil if no chunk is ready.
func (s *sender) next(now Instant, ch *frame.Chunk, lane uint8) (*out, chunker.Releaser) {
	f, again, held := s.Next(now, ch, lane)
	if f == nil {
		return nil, nil
	}
	t := s.tensors[ch.Tensor]
	if !again { // otherwise a peer could keep the tensor forever by asking for the same chunk
		t.touch(now)
	}
	s.stats.ChunksOut++
	s.stats.BytesOut += int64(ch.Len())
	if s.peerDone {
		t.Chunks.AckSent()
	}
	s.settle(t)
	return t, held
}
