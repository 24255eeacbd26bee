package slab

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
)

// ErrBudget is wrapped when an amount can never be granted.
var ErrBudget = errors.New("slab: over the budget")

// Principal is who holds bytes of a Budget: one pointer, one principal. Nil is a
// principal too, whom all share that have no other.
type Principal struct{ name string }

// NewPrincipal returns a principal with a name for logs and panics, perhaps not its alone.
func NewPrincipal(name string) *Principal { return &Principal{name} }

// Name returns the name.
func (p *Principal) Name() string {
	if p == nil {
		return "nobody"
	}
	return p.name
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
	holders map[*Principal]int64
	queue   []*waiter
	spare   map[*func() bool]struct{} // of Reclaim
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
	if n > b.limit || n < 0 {
		b.mu.Unlock()
		return fmt.Errorf("%w for %s: %d bytes asked, the budget is %d", ErrBudget, b.name, n, b.limit)
	}
	b.reclaim(n)
	if len(b.queue) == 0 && n <= b.limit-b.used {
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

// TryAcquire grants n bytes only if nobody waits and holder stays within its half.
func (b *Budget) TryAcquire(holder *Principal, n int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n < 0 || len(b.queue) > 0 || n > b.limit/poolShare-b.holders[holder] {
		return false
	}
	if b.reclaim(n); len(b.queue) > 0 || n > b.limit-b.used {
		return false
	}
	b.grant(holder, n)
	return true
}

// Hold grants n bytes to holder that it has already, whether they fit or not. Whoever asks
// next waits until they do.
func (b *Budget) Hold(holder *Principal, n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.grant(holder, n)
}

// Reclaim registers spare, which is called when an amount does not fit, until stop
// is called. It releases what is not needed now and reports whether it did; then it
// is called again, while the amount still does not fit. It must not block, and must
// not take from this budget.
func (b *Budget) Reclaim(spare func() bool) (stop func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.spare == nil {
		b.spare = make(map[*func() bool]struct{})
	}
	b.spare[&spare] = struct{}{}
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.spare, &spare)
	}
}

// Waited reports whether somebody waits for an amount.
func (b *Budget) Waited() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.queue) > 0
}

// reclaim makes room for n bytes as far as that is possible. It is called with the
// lock, and gives it away for a while.
func (b *Budget) reclaim(n int64) {
	for more := true; more && n > b.limit-b.used; {
		more = false
		for spare := range maps.Clone(b.spare) {
			b.mu.Unlock()
			more = (*spare)() || more
			b.mu.Lock()
		}
	}
}

// Release gives n bytes of holder back. It panics when holder holds fewer.
func (b *Budget) Release(holder *Principal, n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.release(holder, n)
}

// Used returns the bytes granted now, the most there ever were, and the limit.
func (b *Budget) Used() (used, peak, limit int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used, b.peak, b.limit
}

func (b *Budget) grant(holder *Principal, n int64) {
	b.used += n
	b.peak = max(b.peak, b.used)
	b.holders[holder] += n
}

func (b *Budget) release(holder *Principal, n int64) {
	if n < 0 || n > b.holders[holder] {
		panic(fmt.Sprintf("slab: %q releases %d bytes and holds %d", holder.Name(), n, b.holders[holder]))
	}
	b.used -= n
	if b.holders[holder] -= n; b.holders[holder] == 0 {
		delete(b.holders, holder)
	}
	b.admit()
}

// admit grants from the front of the queue. A waiter whose holder already has
// its half is passed over while another holder waits behind it; any other
// waiter that does not fit yet stops the line, so that large ones are not
// starved by small ones.
func (b *Budget) admit() {
	for i := 0; i < len(b.queue); {
		w := b.queue[i]
		over := b.holders[w.holder] > 0 && w.n > b.limit/poolShare-b.holders[w.holder]
		if over && slices.ContainsFunc(b.queue, func(o *waiter) bool { return o.holder != w.holder }) {
			i++
			continue
		}
		if w.n > b.limit-b.used {
			return
		}
		b.queue = slices.Delete(b.queue, i, i+1)
		b.grant(w.holder, w.n)
		close(w.ready)
		i = 0
	}
}
