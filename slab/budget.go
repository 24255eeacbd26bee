package slab

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
)

// ErrBudget is wrapped when an amount can never be granted.
var ErrBudget = errors.New("slab: over the budget")

// Principal is who holds bytes of a Budget: one pointer, one principal. Nil is a
// principal too, whom all share that have no other.
type Principal struct {
	name string
	kept *Kept
	in   atomic.Pointer[Principal] // what In returned
}

// NewPrincipal returns a principal with a name for logs and panics, perhaps not its alone.
func NewPrincipal(name string) *Principal { return &Principal{name: name} }

// Name returns the name.
func (p *Principal) Name() string {
	if p == nil {
		return "nobody"
	}
	return p.name
}

// In returns the principal for what p, who is not nil, holds of a part that is kept: the same
// one each time, so p has one such part.
func (p *Principal) In(k *Kept) *Principal {
	p.in.CompareAndSwap(nil, &Principal{name: p.name, kept: k})
	return p.in.Load()
}

// Kept is a part of a Budget for principals that Principal.In makes. They get its bytes at
// once, whoever else waits, each up to half of them; what they hold beyond is everybody's.
type Kept struct {
	of          *Budget
	limit, used int64 // guarded by of.mu
}

// free returns what is left; mu is held. Nil is a part of no bytes.
func (k *Kept) free() int64 {
	if k == nil {
		return 0
	}
	return max(0, k.limit-k.used)
}

// Budget bounds the bytes promised at a time. Whoever asks gets all or nothing,
// first come first served. While others wait, a holder that has something
// already gets no more than half of the total: it is passed over, not waited for. The
// first amount of a holder that has nothing may be larger, up to the whole
// budget, else it could never be granted under load: it takes its turn and stops
// the line until it fits. It is safe for concurrent use.
type Budget struct {
	name  string
	limit int64

	mu      sync.Mutex // guards all below
	used    int64
	peak    int64
	keeps   int64 // limits of all parts
	kept    int64 // bytes free in them
	holders map[*Principal]int64
	queue   []*waiter
	spare   func() bool // of Reclaim; nil without one
}

type waiter struct {
	holder *Principal
	n      int64
	ready  chan struct{} // closed when granted
}

// NewBudget returns a budget of limit bytes of what name says, such as "memory".
func NewBudget(name string, limit int64) *Budget {
	return &Budget{name: name, limit: limit, holders: make(map[*Principal]int64)}
}

// Acquire waits until n bytes are granted to holder, or ctx ends. Each grant is
// given back by Release with the same holder and amount. When ctx ends first,
// nothing was granted and the error wraps ctx's cause; an amount above the whole
// budget fails at once with ErrBudget.
func (b *Budget) Acquire(ctx context.Context, holder *Principal, n int64) error {
	b.mu.Lock()
	if most := b.limit - b.keeps; n > most || n < 0 {
		apart := ""
		if b.keeps > 0 {
			apart = fmt.Sprintf(", of which %d are kept for small calls", b.keeps)
		}
		b.mu.Unlock()
		return fmt.Errorf("%w for %s: %d bytes asked, the budget is %d%s", ErrBudget, b.name, n, b.limit, apart)
	}
	b.reclaim(holder, n)
	if b.within(holder, n) || len(b.queue) == 0 && b.fits(holder, n) {
		b.grant(holder, n)
		b.mu.Unlock()
		return nil
	}
	w := &waiter{holder, n, make(chan struct{})}
	b.queue = append(b.queue, w)
	b.admit()
	b.mu.Unlock()
	select {
	case <-w.ready:
		return nil
	case <-ctx.Done():
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	select {
	case <-w.ready: // granted in the same moment: give it back
		b.release(holder, n)
	default:
		i := slices.Index(b.queue, w)
		b.queue = slices.Delete(b.queue, i, i+1)
		b.admit() // w may have held up those behind it
	}
	return fmt.Errorf("slab: %d bytes of the %s budget of %d did not become free: %w", n, b.name, b.limit, context.Cause(ctx))
}

// TryAcquire grants n bytes only if nobody waits, or they are kept for holder, and holder stays
// within its half.
func (b *Budget) TryAcquire(holder *Principal, n int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.try(holder, n)
}

// try is TryAcquire; mu is held.
func (b *Budget) try(holder *Principal, n int64) bool {
	if n < 0 || n > b.limit/poolShare-b.holders[holder] {
		return false
	}
	if len(b.queue) == 0 {
		b.reclaim(holder, n)
	}
	if !b.within(holder, n) && (len(b.queue) > 0 || !b.fits(holder, n)) {
		return false
	}
	b.grant(holder, n)
	return true
}

// Keep keeps n bytes apart, until End.
func (b *Budget) Keep(n int64) *Kept {
	k := &Kept{of: b}
	k.set(n)
	return k
}

// End has the part keep nothing any more.
func (k *Kept) End() { k.set(0) }

func (k *Kept) set(limit int64) {
	b := k.of
	b.mu.Lock()
	defer b.mu.Unlock()
	b.keeps += limit - k.limit
	b.kept -= k.free()
	k.limit = limit
	b.kept += k.free()
	b.admit()
}

// part returns the part of b that is kept for a holder, or nil; mu is held.
func (b *Budget) part(holder *Principal) *Kept {
	if holder == nil || holder.kept == nil || holder.kept.of != b {
		return nil
	}
	return holder.kept
}

// within reports whether n bytes are kept for holder; mu is held.
func (b *Budget) within(holder *Principal, n int64) bool {
	k := b.part(holder)
	return k != nil && n <= k.free() && n <= k.limit/poolShare-b.holders[holder]
}

// fits reports whether there are n bytes for holder; mu is held.
func (b *Budget) fits(holder *Principal, n int64) bool {
	return n-min(n, b.part(holder).free()) <= b.limit-b.used-b.kept
}

// Hold grants n bytes to holder that it has already, whether they fit or not. Whoever asks
// next waits until they do.
func (b *Budget) Hold(holder *Principal, n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.grant(holder, n)
}

// Reclaim says what is called when an amount does not fit. Spare releases what is
// not needed now and reports whether it did; then it is called again, while the amount still
// does not fit. It must not block, and must not take from this budget.
func (b *Budget) Reclaim(spare func() bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.spare = spare
}

// Waited reports whether somebody waits for an amount.
func (b *Budget) Waited() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.queue) > 0
}

// reclaim makes room for n bytes as far as that is possible. It is called with the
// lock, and gives it away for a while.
func (b *Budget) reclaim(holder *Principal, n int64) {
	for more := b.spare != nil; more && !b.fits(holder, n); {
		b.mu.Unlock()
		more = b.spare()
		b.mu.Lock()
	}
}

// Release gives n bytes of holder back. It panics when holder holds fewer.
func (b *Budget) Release(holder *Principal, n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.release(holder, n)
}

// Limit returns the bytes that there are.
func (b *Budget) Limit() int64 { return b.limit }

// Used returns the bytes granted now, the most there ever were, and the limit.
func (b *Budget) Used() (used, peak, limit int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used, b.peak, b.limit
}

// grant takes n bytes for holder, or gives -n back; mu is held.
func (b *Budget) grant(holder *Principal, n int64) {
	b.used += n
	b.peak = max(b.peak, b.used)
	b.holders[holder] += n
	if k := b.part(holder); k != nil {
		b.kept -= k.free()
		k.used += n
		b.kept += k.free()
	}
}

func (b *Budget) release(holder *Principal, n int64) {
	if n < 0 || n > b.holders[holder] {
		panic(fmt.Sprintf("slab: %q releases %d bytes and holds %d", holder.Name(), n, b.holders[holder]))
	}
	if b.grant(holder, -n); b.holders[holder] == 0 {
		delete(b.holders, holder)
	}
	b.admit()
}

// admit grants from the front of the queue. A waiter whose holder already has
// its half is passed over while another holder waits behind it; any other
// waiter that does not fit yet stops the line, so that large ones are not
// starved by small ones, but for those whose part has room.
func (b *Budget) admit() {
	stopped := false
	for i := 0; i < len(b.queue); {
		w := b.queue[i]
		over := b.holders[w.holder] > 0 && w.n > b.limit/poolShare-b.holders[w.holder]
		if over && slices.ContainsFunc(b.queue, func(o *waiter) bool { return o.holder != w.holder }) {
			i++
			continue
		}
		if !b.within(w.holder, w.n) && (stopped || !b.fits(w.holder, w.n)) {
			stopped = true
			i++
			continue
		}
		b.queue = slices.Delete(b.queue, i, i+1)
		b.grant(w.holder, w.n)
		close(w.ready)
		i, stopped = 0, false
	}
}
