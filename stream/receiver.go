package stream

import (
	"errors"
	"slices"

	"github.com/tensorferry/tensorferry/assembler"
	"github.com/tensorferry/tensorferry/chunker"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/lifecycle"
	"github.com/tensorferry/tensorferry/tensor"
)

// receiver receives the peer's tensors into memory lent for them.
type receiver struct {
	*shared
	tensors   map[tensor.ID]*in
	credits   []*in   // tensors whose limit is to be sent
	acks      []*in   // tensors to be acknowledged
	lazyAt    Instant // when credits and acks are due; 0 means now
	open      int     // number of tensors that count as open
	allowance int64   // bytes used by the peer
	free      func(done func(filled bool), filled bool)
}

// in is an incoming tensor.
type in struct {
	desc      frame.Desc
	geo       tensor.Geometry
	asm       *assembler.Assembler
	call      *call
	limit     uint32 // last limit sent; all chunks if on allowance
	acked     uint32 // last acknowledgement sent
	resend    []uint32
	open      bool // counts in receiver.open
	dead      bool
	summed    bool  // client: its Summary has come
	retained  int   // server: bytes, included in call.retained
	bytes     int64 // received
	creditDue bool  // in credits
	ackDue    bool  // in acks
	share     int64 // bytes of the allowance
	last      Instant
}

// admit checks a desc against shape arithmetic and limits, before anything of it is
// retained, and returns the tensor's geometry.
func (r *receiver) admit(p *frame.Desc, tensorBytes int64) (tensor.Geometry, *frame.Error) {
	geo, bad := p.Check(r.cfg.Limits.ChunkBytes, tensorBytes)
	if bad != nil {
		return geo, bad
	}
	full := func(format string, args ...any) *frame.Error {
		return frame.Errorf(frame.ResourceExhausted, "tensor "+p.Tensor.String()+": "+format, args...)
	}
	left := int64(r.cfg.Limits.AllowanceBytes) - r.allowance
	switch n := geo.Count(); {
	case r.open >= r.cfg.Limits.OpenTensors:
		return geo, full("open tensors: the limit of a session is %d", r.cfg.Limits.OpenTensors)
	case p.OnAllowance && n > frame.AllowanceChunks:
		return geo, full("%d chunks on allowance, the limit is %d; send larger chunks, or wait for credit instead", n, frame.AllowanceChunks)
	case p.OnAllowance && geo.Size > left:
		return geo, full("%d bytes on allowance, %d are left; wait for credit instead", geo.Size, left)
	}
	return geo, nil
}

// announce adds an admitted tensor.
func (r *receiver) announce(now Instant, p *frame.Desc, geo tensor.Geometry, k *call) *in {
	t := &in{desc: *p, geo: geo, asm: assembler.New(p.Tensor, geo, r.cfg.Check, r.free), call: k, last: now, open: true}
	t.desc.Shape = p.Shape.Clone()
	r.tensors[p.Tensor] = t
	r.most = max(r.most, len(r.tensors))
	r.open++
	k.ins = append(k.ins, t)
	if p.OnAllowance {
		t.limit, t.share = geo.Count(), geo.Size
		r.allowance += t.share
	}
	t.touch(now)
	r.tell(Event{Kind: EventTensor, Call: k.part.ID, Tensor: p.Tensor, Desc: &t.desc})
	return t
}

// touch records progress.
func (t *in) touch(now Instant) { t.last, t.call.last = now, now }

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
	if t.asm.Held() >= t.limit {
		t.touch(now) // the peer was waiting for this
	}
	t.asm.Lend(mem, done)
	m.in.wantCredit(now, t)
	return nil
}

// drop gives up a tensor. Its memory is returned to the lender, at the commit of a claim if
// one is still open.
func (r *receiver) drop(t *in) {
	if t.dead {
		return
	}
	t.dead = true
	t.asm.Drop()
	if r.cfg.Server || !t.asm.Whole() { // otherwise its acknowledgement must still be sent
		t.resend = nil
	}
	delete(r.tensors, t.desc.Tensor)
	r.tombstones.Add(t.desc.Tensor)
	r.uncount(t)
	if k := t.call; k.stored() {
		k.ins = slices.DeleteFunc(k.ins, func(o *in) bool { return o == t })
	}
}

// dropAll drops the tensors of a call.
func (r *receiver) dropAll(k *call) {
	for _, t := range slices.Clone(k.ins) {
		r.drop(t)
	}
	k.ins = nil
}

// uncount stops counting a tensor as open: it is over, or its last acknowledgement has been
// sent.
func (r *receiver) uncount(t *in) {
	if t.open {
		t.open = false
		r.open--
		r.allowance -= t.share
	}
}

// Claim is a chunk that is being copied to its place. It is reused for further chunks.
type Claim struct {
	claim  assembler.Claim
	tensor *in
	lane   bool // made by ClaimLane
}

// Copy writes the chunk's bytes, which it borrows, to their place. It returns their
// checksum, and an error if they could not be decoded. It may run concurrently with the
// machine.
func (c *Claim) Copy(views [][]byte) (got uint32, err error) { return c.claim.Copy(views) }

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
		m.fail(ch.Tensor, t.call, frame.Errorf(frame.InvalidArgument, "tensor "+ch.Tensor.String()+": "+format, args...))
		return false
	}
	if t.call.stored() && t.asm.Whole() {
		return false // late: its holder ends it
	}
	k := codec.Codec(ch.Codec)
	if k != codec.None && !slices.Contains(m.cfg.Codecs, k) {
		return bad("chunk %d is encoded in %v, which the hello of this side does not name", ch.Index, k)
	}
	verdict, err := t.asm.Claim(&c.claim, ch.Index, n, k, ch.Sum)
	switch {
	case err != nil:
		return bad("%v", err)
	case verdict == assembler.Duplicate:
		m.stats.Duplicate++
		m.in.wantAck(now, t, true) // the peer sent it again: it may have missed an ack
		return false
	}
	if !c.claim.Again() {
		t.touch(now)
	}
	t.call.claims++
	c.tensor, c.lane = t, false
	return true
}

// Commit ends a claim with the results of Copy or Fill.
func (m *Machine) Commit(now Instant, c *Claim, got uint32, failed error) {
	t := c.tensor
	c.tensor = nil
	t.call.claims--
	if bad := m.in.commit(now, t, c, got, failed); bad != nil {
		m.fail(t.desc.Tensor, t.call, bad)
	}
	m.settled(t)
	if t.asm.Whole() || t.dead {
		m.calls.advance(t.call)
	}
}

// commit ends a claim. An error ends the tensor.
func (r *receiver) commit(now Instant, t *in, claim *Claim, got uint32, failed error) *frame.Error {
	c := &claim.claim
	off, n := t.geo.Span(c.Index())
	if t.dead {
		_, _ = t.asm.Commit(c, got, failed) // returns the memory
		return nil
	}
	at := len(r.events)
	// Must precede the return of the memory that the chunk fills; removed below if the
	// chunk does not count.
	r.tell(Event{Kind: EventChunk, Call: t.call.part.ID, Tensor: t.desc.Tensor, Desc: &t.desc, Off: off, N: n})
	ok, err := t.asm.Commit(c, got, failed)
	if !ok {
		r.events = r.events[:at]
	}
	switch {
	case errors.Is(err, codec.ErrDecode), errors.Is(err, assembler.ErrConflict): // it arrived as it was sent
		return frame.Errorf(frame.InvalidArgument, "tensor %s: %v", t.desc.Tensor, err)
	case err != nil:
		return frame.Errorf(frame.DataLoss, "tensor %s: %v", t.desc.Tensor, err)
	case !ok:
		r.stats.Corrupt++
		if c.Again() {
			r.wantAck(now, t, true) // as for a duplicate
			return nil
		}
		if r.cfg.OneWay {
			return frame.Errorf(frame.DataLoss, "chunk %d of tensor %s was damaged on its way: its checksum is %08x, promised was %08x; send the tensor again", c.Index(), t.desc.Tensor, got, c.Promised())
		}
		if len(t.resend) >= chunker.MaxResends {
			return frame.Errorf(frame.DataLoss, "tensor %s: %d chunks have a wrong checksum and wait to be requested again", t.desc.Tensor, len(t.resend)+1)
		}
		t.resend = append(t.resend, c.Index())
		r.wantAck(now, t, true)
		return nil
	}
	r.wantCredit(now, t)
	r.stats.ChunksIn++
	r.stats.BytesIn += n
	t.bytes += n
	if claim.lane {
		r.stats.LaneBytesIn += n
	}
	if t.asm.Whole() {
		r.tell(Event{Kind: EventWhole, Call: t.call.part.ID, Tensor: t.desc.Tensor, Desc: &t.desc})
		// Only the sender's memory waits for this one, so it is not urgent unless that
		// memory is scarce, more than half of the allowance is in use, or the sender counts
		// many tensors as open that are here.
		r.wantAck(now, t, t.desc.RetainChunks > 0 && !t.desc.OnAllowance || r.allowance > int64(r.cfg.Limits.AllowanceBytes)/2 || len(r.acks) >= r.cfg.Limits.OpenTensors/2)
	} else if news := t.asm.Below() - t.acked; t.desc.RetainChunks > 0 && news > 0 {
		// Also before it is due: the sender may be able to retain less than it hoped for.
		r.wantAck(now, t, news >= max(1, t.desc.RetainChunks/ackShare))
	}
	return nil
}

// wantAck schedules an acknowledgement: now, or with the next frame.
func (r *receiver) wantAck(now Instant, t *in, urgent bool) {
	if !t.ackDue {
		t.ackDue = true
		r.mayWait(now)
		r.acks = append(r.acks, t)
	}
	if urgent {
		r.lazyAt = 0
	}
}

// wantCredit schedules the sending of a tensor's limit, if it was raised: now, if the peer
// has used half of what it may send, or with the next frame.
func (r *receiver) wantCredit(now Instant, t *in) {
	limit := t.asm.Limit()
	if limit <= t.limit {
		return
	}
	if !t.creditDue {
		t.creditDue = true
		r.mayWait(now)
		r.credits = append(r.credits, t)
	}
	if limit-t.limit+t.asm.Held() >= t.limit {
		r.lazyAt = 0
	}
}

// mayWait starts the delay of credits and acks.
func (r *receiver) mayWait(now Instant) {
	if len(r.credits)+len(r.acks) == 0 {
		r.lazyAt = now + lazyAck
	}
}

// lastAck reports whether a dropped tensor must still be acknowledged: its sender retains
// chunks until then, and a server may send done much later.
func (t *in) lastAck(server bool) bool {
	waits := !server || t.desc.RetainChunks > 0 && !t.desc.OnAllowance && t.call.state == lifecycle.Finishing
	return waits && t.asm.Whole() && t.call.part.Put == nil // which has a Summary
}

func (r *receiver) addCredits(p *parcel) {
	for len(r.credits) > 0 && len(p.Credits) < frameParts {
		t := pop(&r.credits, len(r.credits)-1)
		t.creditDue = false
		if t.dead {
			continue
		}
		t.limit = t.asm.Limit()
		p.Credits = append(p.Credits, frame.Credit{Tensor: t.desc.Tensor, Limit: t.limit})
	}
}

func (r *receiver) addAcks(p *parcel) {
	r.lazyAt = 0
	for len(r.acks) > 0 && len(p.Acks) < frameParts {
		t := r.acks[len(r.acks)-1]
		if t.dead && !t.lastAck(r.cfg.Server) {
			pop(&r.acks, len(r.acks)-1)
			continue // done says more than an ack could
		}
		t.acked = t.asm.Below()
		n := min(len(t.resend), frameParts)
		p.Acks = append(p.Acks, frame.Ack{Tensor: t.desc.Tensor, Below: t.acked, Resend: t.resend[:n:n]})
		if t.resend = t.resend[n:]; len(t.resend) > 0 {
			break
		}
		t.resend, t.ackDue = nil, false
		pop(&r.acks, len(r.acks)-1)
		if t.asm.Whole() {
			r.uncount(t)
		}
	}
}
