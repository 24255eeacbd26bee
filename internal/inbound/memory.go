// Package inbound charges what peers have sent and nobody has consumed, and what they have
// not read.
//
// gRPC returns window to a connection for every byte that it reads, consumed or not, so
// its windows bound what lies unread of one RPC, and not of a connection. A Conn lies
// between gRPC and the socket. It finds the messages in the data frames, charges each
// with its first byte, and reads no further while there is no memory for the next. What
// comes for an RPC that has ended is dropped; what the RPC has left unread stays charged
// until it has been collected.
//
// It refuses to know what messages mean, and owns no bytes of them: they lie in gRPC's
// buffers. A Memory is safe for concurrent use; Read of a Conn, and Open, are for the one
// goroutine of gRPC that reads the connection.
package inbound

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"
)

// ErrMemory ends a connection, or an RPC, for want of memory.
var ErrMemory = errors.New("inbound: no memory for what clients send")

// TooLargeError ends an RPC whose message is larger than gRPC receives.
type TooLargeError struct {
	Bytes, Most int64 // of the message, and of the largest
}

// Error returns both sizes.
func (e *TooLargeError) Error() string {
	return fmt.Sprintf("inbound: message of %d bytes; at most %d are received", e.Bytes, e.Most)
}

// Memory is what all connections of a server may hold of what their peers have sent, or not
// read.
type Memory struct {
	limit int64 // of all
	begin int64 // while at most so many bytes are charged, messages may begin
	share int64 // of one connection, likewise
	rpcs  int64 // bytes for RPCs themselves
	// later runs a function once a collection that begins after now has freed what nobody
	// reaches; gc runs a collection.
	later func(func())
	gc    func()

	mu         sync.Mutex // guards all below, and what it says of a Conn and an RPC
	denied     int64      // RPCs and connections, refused or ended for want of memory
	conns      map[*Conn]struct{}
	used       int64           // of all connections, beyond what each has free
	waiting    []*Conn         // for memory, in their order
	left       map[*Conn]int64 // what RPCs left unread when they ended
	collected  map[*Conn]int64 // likewise: the next collection frees it
	collecting bool            // one that was asked for
	asked      time.Time       // when it had ended
	overdue    *time.Timer     // runs one if none has freed what is collected; nil until there was any
	relieved   time.Time       // when relieve last searched all connections
	opened     int64           // for RPCs themselves, of all connections
	queued     int64           // for what gRPC has in its queue, of all connections
}

// NewMemory returns a Memory of limit bytes, or what messages of so many bytes need.
func NewMemory(limit, message int64) *Memory {
	limit = max(limit, messages*message)
	return &Memory{
		limit: limit, begin: limit / beginOf, share: limit / shareOf, rpcs: min(limit/shareOf, rpcsLimit), later: afterCollection, gc: runtime.GC,
		conns: make(map[*Conn]struct{}), left: make(map[*Conn]int64),
	}
}

// mark is an object that nobody reaches: the next collection that begins finds it.
type mark struct{ _ *mark }

func afterCollection(f func()) {
	runtime.AddCleanup(new(mark), func(f func()) { f() }, f)
}

// Used returns the bytes charged now, what is free for each connection included, the
// limit of what is not, and how many RPCs and connections were refused or ended for want
// of memory.
func (m *Memory) Used() (charged, limit, denied int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for c := range m.conns {
		charged += c.charged + c.queued
	}
	return charged, m.limit, m.denied
}

// beyond is the part of a connection's charge that counts in used.
func beyond(charged int64) int64 { return max(0, charged-Free) }

// fits reports whether c may begin something of n bytes; mu is held. whole tells what is
// short when they do not fit: true, the memory of all; false, c's share.
func (m *Memory) fits(c *Conn, n int64) (fits, whole bool) {
	to := c.charged + n
	switch {
	case to <= Free:
		return true, true
	case c.urgent:
		return m.within(c, n), true
	}
	if to > m.share {
		return false, false
	}
	return m.after(c, n) <= m.begin, true
}

// after is what would be used if c had n bytes more; mu is held.
func (m *Memory) after(c *Conn, n int64) int64 {
	return m.used - beyond(c.charged) + beyond(c.charged+n)
}

// within reports whether all that is charged or queued is within the limit if c has n bytes
// more; mu is held.
func (m *Memory) within(c *Conn, n int64) bool { return m.after(c, n)+m.queued <= m.limit }

// add charges n bytes, which may be fewer than none, whether they fit or not; mu is held.
func (m *Memory) add(c *Conn, n int64) {
	m.used -= beyond(c.charged)
	c.charged += n
	m.used += beyond(c.charged)
	if n >= 0 {
		return
	}
	if c.charged == 0 && c.closed {
		delete(m.conns, c)
	}
	m.admit()
}

// admit gives memory to those who wait for it; mu is held. One that lacks memory of the
// whole is waited for, or it would starve behind smaller ones.
func (m *Memory) admit() {
	before := false // somebody waits for memory of the whole
	for i := 0; i < len(m.waiting); {
		c := m.waiting[i]
		fits, whole := m.fits(c, c.wants)
		if !fits || before && c.charged+c.wants > Free {
			before = before || whole
			i++
			continue
		}
		m.waiting = slices.Delete(m.waiting, i, i+1)
		m.add(c, c.wants)
		c.wants, c.wanting, c.urgent = 0, nil, false
		c.granted <- true // it has room for the one that is waited for
	}
}

// deny notes that memory was refused, and returns false; mu is held.
func (m *Memory) deny() bool {
	m.denied++
	if m.searches() {
		m.shed()
	}
	return false
}

// searches reports whether to search all connections, which is long, for one to relieve
// the others of; mu is held.
func (m *Memory) searches() bool {
	now := time.Now()
	due := now.Sub(m.relieved) >= lookEvery
	if due {
		m.relieved = now
	}
	return due
}

// shed closes the connection that holds most for a peer that does not read, and reports
// whether there is one; mu is held.
func (m *Memory) shed() bool {
	var most *Conn
	for c := range m.conns {
		if c.deaf() && (most == nil || c.held+c.queued > most.held+most.queued) {
			most = c
		}
	}
	if most == nil {
		return false
	}
	most.shed = true
	m.denied++
	go func() { _ = most.Close() }() // ends at once: not with the lock
	return true
}

// try charges n bytes if they fit, and nobody waits for the same; mu is held.
func (m *Memory) try(c *Conn, n int64) bool {
	fits, whole := m.fits(c, n)
	if !fits || whole && c.charged+n > Free && m.wholeWaits() {
		return false
	}
	m.add(c, n)
	return true
}

// wholeWaits reports whether somebody waits for memory of the whole; mu is held.
func (m *Memory) wholeWaits() bool {
	return slices.ContainsFunc(m.waiting, func(c *Conn) bool {
		_, whole := m.fits(c, c.wants)
		return whole
	})
}

// leave notes that nobody will read n bytes of c: they are charged until they have been
// collected; mu is held.
func (m *Memory) leave(c *Conn, n int64) {
	if n == 0 {
		return
	}
	m.left[c] += n
	if !c.closed { // or End does it, for all RPCs at once
		m.await()
	}
}

// await arranges that a collection that begins after now uncharges what RPCs have left,
// unless one is awaited already; mu is held.
func (m *Memory) await() {
	if len(m.left) == 0 || m.collected != nil {
		return
	}
	m.collected, m.left = m.left, make(map[*Conn]int64)
	m.later(m.sweep)
	if m.overdue != nil {
		m.overdue.Reset(collectAfter)
		return
	}
	m.overdue = time.AfterFunc(collectAfter, func() { // buffers lie outside the heap: its growth starts no collection for them
		m.collect()
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.collected != nil { // it was skipped, or something still referred to the mark
			m.overdue.Reset(collectAfter)
		}
	})
}

// sweep uncharges what a collection has freed.
func (m *Memory) sweep() {
	m.mu.Lock()
	defer m.mu.Unlock()
	swept := m.collected
	m.collected = nil
	m.await()
	for c, n := range swept {
		m.add(c, -n)
	}
}

// collect runs a collection if that frees anything and none has just been run.
func (m *Memory) collect() {
	m.mu.Lock()
	due := m.collected != nil && !m.collecting && time.Since(m.asked) >= collectEvery
	m.collecting = m.collecting || due
	m.mu.Unlock()
	if !due {
		return
	}
	m.gc()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.collecting, m.asked = false, time.Now()
}

// relieve ends an RPC that the waiting of c may be due to, if there is one: of c itself
// if it waits in vain, else of the connection that has most, and at last the one that is
// waited for. Without any, it closes the connection that leaves most unread.
func (m *Memory) relieve(c *Conn, waited time.Duration) {
	if rpc := m.victim(c, waited); rpc != nil {
		rpc.cancel(ErrMemory) // without the lock: gRPC opens RPCs under one of its own
	}
}

// victim returns the RPC that relieve ends.
func (m *Memory) victim(c *Conn, waited time.Duration) (victim *RPC) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if c.wants == 0 {
		return nil
	}
	moved := c.consumed != c.looked
	c.looked = c.consumed
	if c.urgent && waited >= stale {
		victim = c.wanting
	} else if !moved && waited >= stale && (waited >= patience || c.queued > 0 || c.busy != nil && c.busy()) {
		victim = c.heaviest(c.wanting)
	}
	// Others wait for the same memory.
	if _, whole := m.fits(c, c.wants); victim == nil && whole && waited >= stale && m.searches() {
		var most *Conn
		for o := range m.conns {
			if o != c && (most == nil || o.charged > most.charged) && o.heaviest(nil) != nil {
				most = o
			}
		}
		if most != nil {
			victim = most.heaviest(nil)
		} else if m.shed() {
			return nil
		}
	}
	if victim == nil && waited >= patience && !c.wanting.shed {
		victim = c.wanting
	}
	if victim != nil {
		victim.shed = true // it is told to end
		m.denied++
		victim.refuse()
	}
	return victim
}
