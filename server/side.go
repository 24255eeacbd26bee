package server

import (
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/slab"
)

// side is what a session may keep beside the memory of its runs: its small
// tensors from their desc until they are copied into blocks, and what is kept per
// chunk of them until their call ends. The first of them takes what hello
// promised from the budget, until the session ends or has been idle, so that those
// within the promise never wait for others. What passes it, or comes while the
// budget has no room for promises, is taken as it comes.
type side struct {
	budget  *slab.Budget
	holder  string // of what is taken as it comes
	promise int64  // bytes

	all *promises

	mu   sync.Mutex // guards all below
	held bool       // the promise is taken
	used int64      // bytes, within the promise and past it
	past int64      // taken for those past it

	since      time.Time // idle; zero: it is not; guarded by all.mu, as are those below
	next, prev *side     // older is prev
}

// promises are those of all sessions. What a session holds and uses nothing
// of is given back when somebody lacks it, of the longest idle first, and of none
// that was in use a moment ago: its small calls are not to wait for others' large ones.
type promises struct {
	mu          sync.Mutex // guards all below; taken after that of a side
	held        int64      // bytes
	first, last *side      // idle
}

// take has d hold its promise, if there is room.
func (l *promises) take(d *side) bool {
	_, _, limit := d.budget.Used()
	for {
		l.mu.Lock()
		room := l.held+d.promise <= limit/promisesShare
		if room {
			l.held += d.promise
		}
		l.mu.Unlock()
		if room {
			break
		}
		if !l.reclaim() {
			return false
		}
	}
	if d.budget.TryAcquire(d.promiseHolder(), d.promise) {
		return true
	}
	l.give(d.promise)
	return false
}

func (l *promises) give(n int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held -= n
}

// rest lists d as idle.
func (l *promises) rest(d *side) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !d.since.IsZero() {
		return
	}
	if d.prev = l.last; l.last == nil {
		l.first = d
	} else {
		l.last.next = d
	}
	l.last, d.since = d, time.Now()
}

// wake takes d off the list.
func (l *promises) wake(d *side) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.unlink(d)
}

// unlink takes d out, if it is in; mu is held.
func (l *promises) unlink(d *side) {
	if d.since.IsZero() {
		return
	}
	if d.prev == nil {
		l.first = d.next
	} else {
		d.prev.next = d.next
	}
	if d.next == nil {
		l.last = d.prev
	} else {
		d.next.prev = d.prev
	}
	d.next, d.prev, d.since = nil, nil, time.Time{}
}

// reclaim gives the promise of the longest idle side back, and reports whether
// there was one. Whoever calls may have locked a side, but none that is in the list.
func (l *promises) reclaim() bool {
	l.mu.Lock()
	d := l.first
	if d != nil && time.Since(d.since) < sideGrace {
		d = nil
	}
	if d != nil {
		l.unlink(d)
	}
	l.mu.Unlock()
	if d == nil {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.used == 0 { // still
		d.giveUp()
	}
	return true
}

// watch reclaims for those who wait for memory, until done is closed: what is idle
// now may not have been when they asked.
func (l *promises) watch(budget *slab.Budget, done <-chan struct{}) {
	tick := time.NewTicker(sideGrace)
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

// promiseHolder holds the promise apart: a session that has sent a small tensor
// is for the budget's fairness not one that has memory already.
func (d *side) promiseHolder() string { return d.holder + "/allowance" }

// take takes n bytes at once, or reports false.
func (d *side) take(n int64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.all.wake(d)
	defer d.rest()
	d.held = d.held || d.all.take(d)
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

// beyond is how much of n bytes the promise does not cover; mu is held.
func (d *side) beyond(n int64) int64 {
	if d.held {
		n -= d.promise
	}
	return max(n, 0)
}

// trim gives back what the promise covers; mu is held.
func (d *side) trim() {
	if less := d.past - d.beyond(d.used); less > 0 {
		d.budget.Release(d.holder, less)
		d.past -= less
	}
}

// give gives n bytes back.
func (d *side) give(n int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.used -= n
	d.trim()
	d.rest()
}

// rest lists the side if it holds its promise for nothing; mu is held.
func (d *side) rest() {
	if d.held && d.used == 0 {
		d.all.rest(d)
	}
}

// close gives the promise back; nothing else is taken any more.
func (d *side) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.all.wake(d)
	d.giveUp()
}

// giveUp gives the promise back; mu is held.
func (d *side) giveUp() {
	if d.held {
		d.budget.Release(d.promiseHolder(), d.promise)
		d.all.give(d.promise)
		d.held = false
	}
}
