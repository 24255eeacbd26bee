package engine

import (
	"runtime"
	"sync"

	"github.com/tensorferry/tensorferry/slab"
)

// HostConfig says what a Host may use. The zero value works.
type HostConfig struct {
	// MemoryBytes is the most memory that runs may hold at a time, and the most
	// that is kept for reuse. Zero means 1 GiB.
	MemoryBytes int64
	// Workers is the number of blocks computed at a time. Zero means GOMAXPROCS.
	Workers int
}

// Host is what models in host memory share: a pool of slabs, the budget that
// bounds it, and the workers that compute blocks. Blocks of all runs wait in one
// first-come queue; a run has no more of them in it than it has slots, so
// none can push the others out. Safe for concurrent use.
type Host struct {
	pool    *slab.Pool
	budget  *slab.Budget
	workers sync.WaitGroup

	mu     sync.Mutex
	more   sync.Cond // the queue grew, or closed
	head   *slot     // linked by slot.next
	tail   *slot
	seats  int // blocks that may be computed at a time, less those that are
	closed bool
}

// NewHost returns a host and starts its workers, which end with Close.
func NewHost(c HostConfig) *Host {
	if c.MemoryBytes <= 0 {
		c.MemoryBytes = defaultMemory
	}
	if c.Workers <= 0 {
		c.Workers = runtime.GOMAXPROCS(0)
	}
	h := &Host{pool: slab.NewPool(c.MemoryBytes, slab.System), budget: slab.NewBudget("memory", c.MemoryBytes)}
	h.more.L = &h.mu
	h.seats = c.Workers
	for range c.Workers {
		h.workers.Go(h.work)
	}
	return h
}

// Pool returns the pool that every block of the host's models comes from.
func (h *Host) Pool() *slab.Pool { return h.pool }

// Budget returns the budget that every run of the host's models is admitted by.
func (h *Host) Budget() *slab.Budget { return h.budget }

// Close ends the workers and returns when they have: blocks being computed are
// finished, those still queued fail with ErrClosed, as do runs that go on.
func (h *Host) Close() {
	h.mu.Lock()
	h.closed = true
	h.more.Broadcast()
	h.mu.Unlock()
	h.workers.Wait()
}

// take hands over a slab of n bytes, nil for none.
func (h *Host) take(n int64) (*slab.Slab, error) {
	if n == 0 {
		return nil, nil
	}
	return h.pool.Get(int(n))
}

// submit queues a block to be computed. It reports false on a closed host. The
// caller holds the lock of the block's run. No worker is woken for a block that
// the taker of its result will help with.
func (h *Host) submit(s *slot) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return false
	}
	s.next = nil
	if h.head == nil {
		h.head = s
	} else {
		h.tail.next = s
	}
	h.tail = s
	if h.head == s && s.run.helped() {
		wake(s.run.nextable) // Next may be waiting already
	} else {
		h.more.Signal()
	}
	return true
}

// drop takes the blocks of r that no worker has started out of the queue. The
// caller holds r.mu.
func (h *Host) drop(r *run) (dropped int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	at := &h.head
	h.tail = nil
	for s := h.head; s != nil; s = s.next {
		if s.run == r {
			s.state, s.out.writing = slotFree, false
			dropped++
			continue
		}
		*at, at, h.tail = s, &s.next, s
	}
	*at = nil
	return dropped
}

// work is a worker: it computes the blocks of every run.
func (h *Host) work() {
	for {
		h.mu.Lock()
		for !h.closed && (h.head == nil || h.seats == 0) {
			h.more.Wait()
		}
		closed, s := h.closed, h.head
		if s == nil {
			h.mu.Unlock()
			return
		}
		h.pop()
		h.mu.Unlock()
		if closed {
			s.run.cancel(ErrClosed)
		}
		s.run.compute(s)
		h.leave()
	}
}

// help computes the next block in the queue if it is one of r's and a seat is
// free, and reports whether it did. Whoever waits for r's results then waits for
// no worker to wake up, which takes longer than a small block does.
func (h *Host) help(r *run) bool {
	h.mu.Lock()
	s := h.head
	if s == nil || s.run != r || h.seats == 0 || h.closed {
		h.mu.Unlock()
		return false
	}
	h.pop()
	h.mu.Unlock()
	r.compute(s)
	h.leave()
	return true
}

// pop takes the first block and a seat; mu is held. The next block may have been
// queued behind one that woke no worker: its own wake-up then went to the first.
func (h *Host) pop() {
	h.seats--
	if h.head = h.head.next; h.head == nil {
		h.tail = nil
	} else if h.seats > 0 {
		h.more.Signal()
	}
}

// leave gives the seat back.
func (h *Host) leave() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.seats++
	if h.head != nil {
		h.more.Signal()
	}
}
