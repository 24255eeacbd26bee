package serving

import (
	"container/list"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/slab"
)

// staging is the memory of a session outside its runs. It holds small tensors from their
// desc until they are copied into blocks, and their chunk tables until their call ends. The
// first small tensor reserves what hello allows, until the session ends or has been idle,
// so that tensors within the reservation never wait for others' memory. Memory beyond the
// reservation, or needed while the budget has no room for reservations, is acquired as
// needed.
type staging struct {
	budget   *slab.Budget
	holder   *slab.Principal // of memory acquired as needed
	promised bool            // the session may make a reservation
	reserved int64           // bytes of it

	// reserver holds the reservation separately: for the fairness of the budget, a session
	// that has only sent a small tensor does not count as having memory.
	reserver *slab.Principal

	all *reservations

	mu   sync.Mutex // guards all below
	held bool       // the reservation is acquired
	used int64      // bytes used, within the reservation and beyond it
	past int64      // bytes acquired beyond it

	idle  *list.Element // of all.idle; nil if not idle; guarded by all.mu
	since time.Time     // idle since; guarded by all.mu
}

// reservations tracks the reservations of all sessions. When memory is short, unused ones
// are returned, the longest idle first, but none that was in use a moment ago: small calls
// must not wait for others' large ones.
type reservations struct {
	mu       sync.Mutex // guards all below; taken after that of a staging
	promised int64      // bytes of the reservations that sessions may make
	idle     list.List  // of *staging, the longest idle first
}

// promise returns how much of an allowance of most bytes a new session is granted. All
// sessions may use theirs at the same time, so when little is left, each gets a part of
// that, or nothing and must wait for credit. The close of its staging takes it back.
func (l *reservations) promise(b *slab.Budget, most uint32) uint32 {
	_, _, limit := b.Used()
	l.mu.Lock()
	defer l.mu.Unlock()
	left := limit/reservationsShare - l.promised
	n := uint32(min(int64(most), max(left/promiseShare-reservation(0), 0))) &^ (promiseUnit - 1)
	if n > 0 {
		l.promised += reservation(n)
	}
	return n
}

// wake removes d from the idle list, if it is in it.
func (l *reservations) wake(d *staging) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if d.idle != nil {
		l.idle.Remove(d.idle)
		d.idle = nil
	}
}

// reclaim returns the reservation that has been idle longest, and reports whether there was
// one that had not been in use a moment ago. The caller may have locked a staging, but none
// in the list.
func (l *reservations) reclaim() bool {
	var d *staging
	l.mu.Lock()
	if first := l.idle.Front(); first != nil && time.Since(first.Value.(*staging).since) >= stagingGrace {
		d = l.idle.Remove(first).(*staging)
		d.idle = nil
	}
	l.mu.Unlock()
	if d == nil {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.used == 0 { // still idle
		d.giveUp()
	}
	return true
}

// watch reclaims for those who wait for memory, until done is closed: what is idle now may
// not have been idle when they asked.
func (l *reservations) watch(budget *slab.Budget, done <-chan struct{}) {
	tick := time.NewTicker(stagingGrace)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-done:
			return
		}
		for budget.Waited() && l.reclaim() {
		}
	}
}

// take acquires n bytes without waiting, or returns false.
func (d *staging) take(n int64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.all.wake(d)
	defer d.rest()
	d.held = d.held || d.promised && d.budget.TryAcquire(d.reserver, d.reserved)
	if more := d.beyond(d.used+n) - d.past; more > 0 {
		if !d.budget.TryAcquire(d.holder, more) {
			return false
		}
		d.past += more
	}
	d.used += n
	d.trim()
	return true
}

// beyond returns how many of n bytes the reservation does not cover; mu is held.
func (d *staging) beyond(n int64) int64 {
	if d.held {
		n -= d.reserved
	}
	return max(n, 0)
}

// trim releases memory that the reservation covers; mu is held.
func (d *staging) trim() {
	if less := d.past - d.beyond(d.used); less > 0 {
		d.budget.Release(d.holder, less)
		d.past -= less
	}
}

// give returns n bytes.
func (d *staging) give(n int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.used -= n
	d.trim()
	d.rest()
}

// rest adds the staging to the idle list if it holds an unused reservation; mu is held.
func (d *staging) rest() {
	if !d.held || d.used > 0 {
		return
	}
	d.all.mu.Lock()
	defer d.all.mu.Unlock()
	if d.idle == nil {
		d.idle, d.since = d.all.idle.PushBack(d), time.Now()
	}
}

// close returns the reservation and the promise. Nothing must be acquired afterwards.
func (d *staging) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.all.wake(d)
	d.giveUp()
	if d.promised {
		d.all.mu.Lock()
		defer d.all.mu.Unlock()
		d.all.promised -= d.reserved
	}
}

// giveUp returns the reservation; mu is held.
func (d *staging) giveUp() {
	if d.held {
		d.budget.Release(d.reserver, d.reserved)
		d.held = false
	}
}
