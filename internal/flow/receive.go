package flow

import (
	"github.com/tensorferry/tensorferry/assembler"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/terms"
)

// In is an incoming tensor.
type In struct {
	Tensor
	Asm       *assembler.Assembler
	Owner     Owner
	Open      bool   // counts in Receiver.Open
	Stays     bool   // on allowance, in memory that is promised for it: not acknowledged until that is free
	Unchecked bool   // its last chunk is not acknowledged yet: its holder has not accepted it
	acked     uint32 // chunks held at the last acknowledgement
	resend    []uint32
	creditDue bool // in credits
	ackDue    bool // in acks
}

// Owner is what an incoming tensor belongs to.
type Owner interface {
	// OwesAck reports whether a tensor that has ended, and is whole, must still be
	// acknowledged.
	OwesAck(server bool, d *frame.Desc) bool
}

// Receiver decides which credits and acknowledgements are sent.
type Receiver struct {
	Terms     *terms.Config
	Open      int           // number of tensors that count as open
	Allowance int64         // bytes used by the peer
	LazyAt    terms.Instant // when credits and acks are due; 0 means now

	credits []*In // tensors whose limit is to be sent
	acks    []*In // tensors to be acknowledged
}

// Start counts a tensor as open.
func (r *Receiver) Start(t *In) {
	t.Open = true
	r.Open++
	if t.Desc.OnAllowance {
		t.Limit, t.Share = t.Geo.Count(), t.Geo.Size
		r.Allowance += t.Share
	}
}

// End ends a tensor. Its memory is returned to the lender, at the commit of a claim if one
// is still open.
func (r *Receiver) End(t *In) {
	t.Dead = true
	t.Asm.Drop()
	if r.Terms.Server || !t.Asm.Whole() { // otherwise its acknowledgement must still be sent
		t.resend = nil
	}
	r.uncount(t)
}

// uncount stops counting a tensor as open: it is over, or its last acknowledgement has been
// sent.
func (r *Receiver) uncount(t *In) {
	if t.Open {
		t.Open = false
		r.Open--
		r.Allowance -= t.Share
	}
}

// Arrived handles a chunk that is in its place.
func (r *Receiver) Arrived(now terms.Instant, t *In) {
	r.WantCredit(now, t)
	short := r.Allowance > int64(r.Terms.Limits.AllowanceBytes)/2
	switch news := t.Asm.Held() - t.acked; {
	case t.Asm.Whole() && (t.Stays || t.Unchecked && t.Geo.Count() == 1):
	case t.Asm.Whole():
		// Only the sender's memory waits for this one, so it is not urgent unless that
		// memory is scarce, more than half of the allowance is in use, or the sender counts
		// many tensors as open that are here.
		r.WantAck(now, t, t.Desc.RetainChunks > 0 && !t.Desc.OnAllowance ||
			short || len(r.acks) >= r.Terms.Limits.OpenTensors/2)
	case t.Desc.RetainChunks > 0 && news > 0:
		// Also before it is due: the sender may be able to retain less than it hoped for.
		r.WantAck(now, t, news >= max(1, t.Desc.RetainChunks/ackShare))
	}
}

// Stay says whether a tensor stays in memory that is promised for it.
func (r *Receiver) Stay(now terms.Instant, t *In, stays bool) {
	if t.Stays = stays; t.Asm.Whole() {
		r.Arrived(now, t)
	}
}

// Resend has a chunk sent again.
func (r *Receiver) Resend(now terms.Instant, t *In, index uint32) {
	t.resend = append(t.resend, index)
	r.WantAck(now, t, true)
}

// Resends returns how many chunks of a tensor wait to be requested again.
func (t *In) Resends() int { return len(t.resend) }

// WantAck schedules an acknowledgement: now, or with the next frame.
func (r *Receiver) WantAck(now terms.Instant, t *In, urgent bool) {
	if !t.ackDue {
		t.ackDue = true
		r.mayWait(now)
		r.acks = append(r.acks, t)
	}
	if urgent {
		r.LazyAt = 0
	}
}

// WantCredit schedules the sending of a tensor's limit, if it was raised: now, if the peer
// has used half of what it may send, or with the next frame.
func (r *Receiver) WantCredit(now terms.Instant, t *In) {
	limit := t.Asm.Limit()
	if limit <= t.Limit {
		return
	}
	if !t.creditDue {
		t.creditDue = true
		r.mayWait(now)
		r.credits = append(r.credits, t)
	}
	if limit-t.Limit+t.Asm.Held() >= t.Limit {
		r.LazyAt = 0
	}
}

// mayWait starts the delay of credits and acks.
func (r *Receiver) mayWait(now terms.Instant) {
	if len(r.credits)+len(r.acks) == 0 {
		r.LazyAt = now + lazyAck
	}
}

// DueNow reports whether a credit or an acknowledgement waits for nothing else.
func (r *Receiver) DueNow() bool { return len(r.credits)+len(r.acks) > 0 && r.LazyAt == 0 }

// Due returns how many credits and acknowledgements wait to be sent.
func (r *Receiver) Due() (credits, acks int) { return len(r.credits), len(r.acks) }

// Add adds what waits to a frame.
func (r *Receiver) Add(p *Parcel) {
	r.LazyAt = 0
	for len(r.credits) > 0 && p.Room(len(p.Credits)) {
		t := Pop(&r.credits, len(r.credits)-1)
		t.creditDue = false
		if !t.Dead {
			t.Limit = t.Asm.Limit()
			p.Credits = append(p.Credits, frame.Credit{Tensor: t.Desc.Tensor, Limit: t.Limit})
		}
	}
	for len(r.acks) > 0 && p.Room(len(p.Acks)) {
		t := r.acks[len(r.acks)-1]
		whole := t.Asm.Whole() && !t.Unchecked
		if t.Dead && !(whole && t.Owner.OwesAck(r.Terms.Server, &t.Desc)) {
			Pop(&r.acks, len(r.acks)-1)
			continue // done says more than an ack could
		}
		t.acked = t.Asm.Held()
		n := min(len(t.resend), frameParts)
		a := frame.Ack{Tensor: t.Desc.Tensor, Below: t.Asm.Below(), Resend: t.resend[:n:n]}
		if t.acked > a.Below {
			a.Beyond = t.Asm.Beyond(frame.AckPairs)
		}
		if last := t.Geo.Count() - 1; t.Unchecked {
			a.Below = min(a.Below, last)
			if n := len(a.Beyond); n > 0 && a.Beyond[n-1] > last {
				if a.Beyond[n-1] = last; a.Beyond[n-2] == last {
					a.Beyond = a.Beyond[:n-2]
				}
			}
		}
		p.Acks = append(p.Acks, a)
		p.Bytes += 5 * (len(a.Beyond) + n) // of varints
		if t.resend = t.resend[n:]; len(t.resend) > 0 {
			break
		}
		t.resend, t.ackDue = nil, false
		Pop(&r.acks, len(r.acks)-1)
		if whole {
			r.uncount(t)
		}
	}
}
