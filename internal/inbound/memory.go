// Package inbound charges what peers have sent and nobody has consumed, and what they have
// not read.
//
// gRPC returns window to a connection for every byte that it reads, consumed or not, so
// its windows bound what lies unread of one RPC, and not of a connection. A Conn lies
// between gRPC and the socket. It finds the messages in the data frames, charges each
// with its first byte, or frame by frame if it is larger than the server's own, and reads no
// further while there is no memory for the next. What
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

	"golang.org/x/time/rate"
)

var (
	// ErrMemory ends a connection, or an RPC, for want of memory.
	ErrMemory = errors.New("inbound: no memory for what clients send")
	// ErrControl ends a connection for frames that bring nothing.
	ErrControl = fmt.Errorf("inbound: over %d frames a second that bring nothing, such as pings, for %v: send fewer", controlRate, pause)
	// ErrUnread ends a connection for what its peer does not read.
	ErrUnread = errors.New("inbound: its peer does not read")
)

// TooLargeError ends an RPC whose message is larger than gRPC receives, or than memory allows.
type TooLargeError struct {
	Bytes, Most int64 // of the message, and of the largest
	Takes       int64 // what it would be charged, if that is more than there is: Most is memory then
}

// Error returns the sizes.
func (e *TooLargeError) Error() string {
	if e.Takes > 0 {
		return fmt.Sprintf("inbound: message of %d bytes takes %d; at most %d are for one", e.Bytes, e.Takes, e.Most)
	}
	return fmt.Sprintf("inbound: message of %d bytes; at most %d are received", e.Bytes, e.Most)
}

// Memory is what all connections of a server may hold of what their peers have sent, or not
// read.
type Memory struct {
	limit int64 // of all
	share int64 // of one connection, while messages may begin
	rpcs  int64 // bytes for RPCs themselves
	own   int64 // bytes of the largest message of the server's own
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
	searching  rate.Sometimes  // all connections, which is long, for one to rid the others of
	opened     int64           // for RPCs themselves, of all connections
	queued     int64           // for what gRPC has in its queue, of all connections
	larger     int64           // of used, what connections have whose messages may be larger than own
	line       []*RPC          // that wait for the rest of a message larger than own, in the order in which those began
}

// NewMemory returns a Memory of limit bytes, or what the server's own messages, of at most so
// many bytes, need. Larger ones, of other services, get along with it.
func NewMemory(limit, message int64) *Memory {
	limit = max(limit, messages*message)
	return &Memory{
		own: message, limit: limit, share: limit / shareOf, rpcs: min(limit/shareOf, rpcsLimit), later: afterCollection, gc: runtime.GC,
		conns: make(map[*Conn]struct{}), left: make(map[*Conn]int64),
		searching: rate.Sometimes{Interval: lookEvery},
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

// fits reports whether r's connection may begin something of n bytes; mu is held. whole tells
// what is short when they do not fit: true, the memory of all; false, the connection's share.
func (m *Memory) fits(r *RPC, n int64) (fits, whole bool) {
	c := r.c
	to := c.charged + n
	switch {
	case to <= Free:
		return true, true
	case c.urgent:
		return m.grows(r, n), true
	case to > m.share:
		return false, false
	case c.large:
		return m.leaves(r, n, beginOf), true
	}
	return m.after(c, n)-m.larger <= (m.limit-m.larger)/beginOf, true
}

// grows reports whether r may have n bytes more while messages of its connection are in parts;
// mu is held.
func (m *Memory) grows(r *RPC, n int64) bool {
	if r.c.large && r.c.charged+n > Free {
		return m.leaves(r, n, 1)
	}
	return m.within(r.c, n)
}

// leaves reports whether connections with larger messages have at most 1/part of what they may
// if r gets n bytes more; mu is held. They leave a share to the others, and nothing of the
// half that those have begun to fill: those never wait for them alone. The first in line is
// left the rest of its message: of two that wait for each other, both would have to end.
func (m *Memory) leaves(r *RPC, n, part int64) bool {
	if len(m.line) > 0 && m.line[0] != r {
		n += m.line[0].rest
	}
	others := m.used - m.larger
	return m.after(r.c, n)-others <= (m.limit-max(m.share, beginOf*others, beginOf*m.queued))/part
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
	before := beyond(c.charged)
	c.charged += n
	more := beyond(c.charged) - before
	m.used += more
	if c.large {
		m.larger += more
	}
	if n >= 0 {
		return
	}
	if c.charged == 0 && c.closed {
		delete(m.conns, c)
	}
	m.admit()
}

// admit gives memory to those who wait for it; mu is held. One that lacks memory of the
// whole is waited for, or it would starve behind smaller ones, but not by the urgent, nor by
// connections of the other kind.
func (m *Memory) admit() {
	var before, beforeLarge bool // somebody waits for memory of the whole
	for i := 0; i < len(m.waiting); {
		c := m.waiting[i]
		fits, whole := m.fits(c.wanting, c.wants)
		waits := &before
		if c.large {
			waits = &beforeLarge
		}
		if !fits || *waits && !c.urgent && c.charged+c.wants > Free {
			*waits = *waits || whole
			i++
			continue
		}
		m.waiting = slices.Delete(m.waiting, i, i+1)
		m.add(c, c.wants)
		if r := c.wanting; r.large { // it was not slow
			r.since, r.came = time.Now(), 0
		}
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

// searches reports whether to search all connections now; mu is held.
func (m *Memory) searches() (due bool) {
	m.searching.Do(func() { due = true })
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
	m.denied++
	most.cut()
	return true
}

// cut closes a connection whose peer does not read; mu is held.
func (c *Conn) cut() {
	c.shed = true
	go func() { // ends at once: not with the lock
		c.Closing(ErrUnread)
		_ = c.Close() // gRPC's reader cleans up the rest
	}()
}

// Look closes connections whose peers do not read. Each RPC has its own idle timeout, but what
// an RPC sent before it ended stays in gRPC's queue, along with the memory it occupies, for as
// long as the peer's window is closed. gRPC cannot reset a stream then, so the connection must
// be closed: if a frame that was queued at the last look still is.
func (m *Memory) Look() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for c := range m.conns {
		if c.look() && !c.shed && !c.closed {
			c.cut()
		}
	}
}

// try charges n bytes if they fit, and no connection of its kind waits for the same; mu is held.
func (m *Memory) try(r *RPC, n int64) bool {
	c := r.c
	fits, whole := m.fits(r, n)
	if !fits || whole && c.charged+n > Free && slices.ContainsFunc(m.waiting, func(o *Conn) bool {
		_, whole := m.fits(o.wanting, o.wants)
		return whole && o.large == c.large
	}) {
		return false
	}
	m.add(c, n)
	return true
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
	if !due { // a connection does not wait for the collection, but for memory
		return
	}
	m.gc()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.collecting, m.asked = false, time.Now()
}

// victim returns an RPC that the waiting of c may be due to, which is to be ended, if there is one: of
// c itself if it waits in vain, else of the connection that has most, and at last the one that is
// waited for. Without any, it closes the connection that leaves most unread.
func (m *Memory) victim(c *Conn, waited time.Duration) (victim *RPC) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if c.wants == 0 {
		return nil
	}
	moved := c.consumed != c.looked
	c.looked = c.consumed
	if c.urgent && waited >= stale && !(c.wanting.large && (c.parts == 1 || c.wanting.first())) {
		victim = c.wanting
	} else if !moved && waited >= stale && (waited >= patience || c.queued > 0 || c.busy != nil && c.busy()) {
		victim = c.heaviest(c.wanting)
	}
	// Others wait for the same memory.
	if _, whole := m.fits(c.wanting, c.wants); victim == nil && whole && waited >= stale && m.searches() {
		var most *Conn
		for o := range m.conns {
			if (o != c || c.wanting.large) && o.large == c.large && (most == nil || o.charged > most.charged) && o.heaviest(nil) != nil {
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
		victim.drop()
	}
	return victim
}
