package stream

import (
	"errors"
	"slices"

	"github.com/tensorferry/tensorferry/assembler"
	"github.com/tensorferry/tensorferry/chunker"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/flow"
	"github.com/tensorferry/tensorferry/internal/lifecycle"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/tensor"
)

// receiver receives the peer's tensors into memory lent for them.
type receiver struct {
	*shared
	flow.Receiver
	tensors map[tensor.ID]*in
	free    func(done func(filled bool), filled bool)
}

// in is an incoming tensor.
type in struct {
	flow.In
	transfer
	summed   bool // client: its Summary has come
	retained int  // server: bytes, included in call.retained
}

// announce adds an admitted tensor.
func (r *receiver) announce(now Instant, p *frame.Desc, geo tensor.Geometry, k *call) *in {
	t := &in{transfer: transfer{call: k}, In: flow.In{
		Tensor: flow.Tensor{Desc: *p, Geo: geo}, Owner: k, Stays: p.OnAllowance && k.part.Put != nil, Unchecked: k.part.Get != nil,
		Asm: assembler.New(p.Tensor, geo, r.cfg.Check, r.free),
	}}
	t.Desc.Shape = p.Shape.Clone()
	r.tensors[p.Tensor] = t
	r.most = max(r.most, len(r.tensors))
	k.ins = append(k.ins, t)
	r.Start(&t.In)
	t.touch(now)
	r.tell(Event{Kind: EventTensor, Call: k.part.ID, Tensor: p.Tensor, Desc: &t.Desc})
	return t
}

// Lend lends mem as the next bytes of an incoming tensor until done is called: once, inside
// Event, in the order of the events, before EventClosed of the tensor's call is returned.
// If filled is true, every byte of mem is in place; if false, the tensor was given up and
// the contents of mem are undefined. No claim that could touch mem is open then. done may
// be nil, and may call the machine. After an error, mem was not lent and done is never
// called. Lend panics if mem extends beyond the tensor's end.
func (m *Machine) Lend(now Instant, id tensor.ID, mem []byte, done func(filled bool)) error {
	t := m.in.tensors[id]
	if t == nil {
		return ErrClosed
	}
	if t.Asm.Held() >= t.Limit {
		t.touch(now) // the peer was waiting for this
	}
	t.Asm.Lend(mem, done)
	m.in.WantCredit(now, &t.In)
	return nil
}

// InPlace returns how many bytes of an incoming tensor, from its beginning on, are in place.
func (m *Machine) InPlace(id tensor.ID) int64 {
	if t := m.in.tensors[id]; t != nil {
		return min(int64(t.Asm.Below())*t.Geo.ChunkBytes, t.Geo.Size)
	}
	return 0
}

// Stay says whether a tensor on allowance stays in memory that is promised for such: while it
// does, it is not acknowledged, and its part of the allowance does not go back.
func (m *Machine) Stay(now Instant, id tensor.ID, stays bool) {
	if t := m.in.tensors[id]; t != nil {
		m.in.Stay(now, &t.In, stays)
	}
}

// drop gives up a tensor. Its memory is returned to the lender, at the commit of a claim if
// one is still open.
func (r *receiver) drop(t *in) {
	if t.Dead {
		return
	}
	r.End(&t.In)
	delete(r.tensors, t.Desc.Tensor)
	r.tombstones.Add(t.Desc.Tensor)
	if k := t.call; k.part.Stored() {
		k.ins = slices.DeleteFunc(k.ins, func(o *in) bool { return o == t }) // nothing of it is kept
		k.retained -= t.retained
		r.retained -= t.retained
	}
}

// dropAll drops the tensors of a call.
func (r *receiver) dropAll(k *call) {
	ins := k.ins
	k.ins = nil
	for _, t := range ins {
		r.drop(t)
	}
}

// Claim is a chunk that is being copied to its place. It is reused for further chunks. What
// assembler.Claim does may run concurrently with the machine.
type Claim struct {
	assembler.Claim
	tensor *in
	lane   bool // made by ClaimLane
}

// end returns the tensor of a claim that is open no more.
func (c *Claim) end() *in {
	t := c.tensor
	c.tensor = nil
	t.call.claims--
	return t
}

// Claim decides whether to accept the chunk of a frame whose control parts have been
// handled. If it returns true, the caller calls c.Copy, outside any lock, and then Commit.
// An error ends the session.
func (m *Machine) Claim(now Instant, ch *frame.Chunk, c *Claim) (bool, error) {
	if m.err != nil || m.shut || ch.Tensor.IsZero() {
		return false, m.err
	}
	t := m.in.tensors[ch.Tensor]
	if t == nil {
		m.unknown(ch.Tensor)
		return false, nil
	}
	return m.claim(now, t, ch, ch.Len(), c), nil
}

// claim decides whether to accept a chunk of n bytes of an incoming tensor.
func (m *Machine) claim(now Instant, t *in, ch *frame.Chunk, n int, c *Claim) bool {
	bad := func(format string, args ...any) bool {
		m.fail(&t.Desc, t.call, frame.Errorf(frame.InvalidArgument, "tensor "+ch.Tensor.String()+": "+format, args...))
		return false
	}
	if t.call.part.Stored() && t.Asm.Whole() {
		return false // late: its holder ends it
	}
	k := codec.Codec(ch.Codec)
	if k != codec.None && !slices.Contains(m.cfg.Codecs, k) {
		return bad("chunk %d is encoded in %v, which the hello of this side does not name", ch.Index, k)
	}
	place, err := t.Asm.Claim(&c.Claim, ch.Index, n, k, ch.Sum)
	switch {
	case err != nil:
		return bad("%s", reason.Plain(err))
	case !place:
		m.stats.Duplicate++
		m.in.WantAck(now, &t.In, true) // the peer sent it again: it may have missed an ack
		return false
	}
	t.call.claims++
	c.tensor, c.lane = t, false
	return true
}

// Commit ends a claim with the results of Copy or Fill.
func (m *Machine) Commit(now Instant, c *Claim, got uint32, failed error) {
	t := c.end()
	if bad := m.in.commit(now, t, c, got, failed); bad != nil {
		m.fail(&t.Desc, t.call, bad)
	}
	if t.Asm.Whole() || t.Dead {
		m.settled(t)
	}
}

// commit ends a claim. An error ends the tensor.
func (r *receiver) commit(now Instant, t *in, c *Claim, got uint32, failed error) *frame.Error {
	off, n := t.Geo.Span(c.Index())
	if t.Dead {
		_, _ = t.Asm.Commit(&c.Claim, got, failed) // returns the memory
		return nil
	}
	at := len(r.events)
	// Must precede the return of the memory that the chunk fills; removed below if the
	// chunk does not count.
	r.tell(Event{Kind: EventChunk, Call: t.call.part.ID, Tensor: t.Desc.Tensor, Desc: &t.Desc, Off: off, N: n})
	ok, err := t.Asm.Commit(&c.Claim, got, failed)
	if !ok {
		r.events = r.events[:at]
	}
	switch {
	case errors.Is(err, codec.ErrDecode), errors.Is(err, assembler.ErrConflict): // it arrived as it was sent
		return frame.Errorf(frame.InvalidArgument, "tensor %s: %s", t.Desc.Tensor, reason.Plain(err))
	case err != nil:
		return frame.Errorf(frame.DataLoss, "tensor %s: %s", t.Desc.Tensor, reason.Plain(err))
	case !ok:
		r.stats.Corrupt++
		switch {
		case c.Again():
			r.WantAck(now, &t.In, true) // as for a duplicate
			return nil
		case r.cfg.OneWay:
			return frame.Errorf(frame.DataLoss, "chunk %d of tensor %s was damaged on its way: its checksum is %08x, promised was %08x; send the tensor again", c.Index(), t.Desc.Tensor, got, c.Promised())
		case t.Resends() >= chunker.MaxResends:
			return frame.Errorf(frame.DataLoss, "tensor %s: %d chunks have a wrong checksum and wait to be requested again", t.Desc.Tensor, t.Resends()+1)
		}
		r.Resend(now, &t.In, c.Index())
		return nil
	}
	t.touch(now)
	r.stats.ChunksIn++
	r.stats.BytesIn += n
	if c.lane {
		r.stats.LaneBytesIn += n
	}
	if t.Asm.Whole() {
		r.tell(Event{Kind: EventWhole, Call: t.call.part.ID, Tensor: t.Desc.Tensor, Desc: &t.Desc})
	}
	r.Arrived(now, &t.In)
	return nil
}

// OwesAck reports whether a tensor of a call that has ended must still be acknowledged: its
// sender retains chunks until then, and a server may send done much later. A put has a
// Summary.
func (k *call) OwesAck(server bool, d *frame.Desc) bool {
	waits := !server || d.RetainChunks > 0 && !d.OnAllowance && k.state == lifecycle.Finishing
	return waits && k.part.Put == nil
}
