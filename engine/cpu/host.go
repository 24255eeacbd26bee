package cpu

import (
	"context"
	"runtime"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/blocks"
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
// bounds it, and the workers that compute blocks. Safe for concurrent use.
type Host struct {
	pool    *slab.Pool
	budget  *slab.Budget
	workers *workers
	engine  *blocks.Engine
	// sleepers are the device of the engine late, where the model slow runs.
	sleepers *sleepers
	late     *blocks.Engine
}

// NewHost returns a host and starts its workers, which end with Close.
func NewHost(c HostConfig) *Host {
	if c.MemoryBytes <= 0 {
		c.MemoryBytes = defaultMemory
	}
	if c.Workers <= 0 {
		c.Workers = runtime.GOMAXPROCS(0)
	}
	h := &Host{
		pool: slab.NewPool(c.MemoryBytes, slab.System), budget: slab.NewBudget("memory", c.MemoryBytes),
		workers: &workers{seats: c.Workers},
	}
	h.engine = blocks.New(blocks.Config{Name: "cpu", Device: h.workers, Pool: h.pool, Budget: h.budget})
	h.sleepers = &sleepers{asleep: make(map[*blocks.Work]*time.Timer)}
	h.late = blocks.New(blocks.Config{Name: "cpu", Device: h.sleepers, Pool: h.pool, Budget: h.budget})
	h.workers.more.L = &h.workers.mu
	for range c.Workers {
		h.workers.all.Go(h.workers.work)
	}
	return h
}

// Pool returns the pool that every block of the host's models comes from.
func (h *Host) Pool() *slab.Pool { return h.pool }

// Budget returns the budget that every run of the host's models is admitted by.
func (h *Host) Budget() *slab.Budget { return h.budget }

// Close ends the workers and returns when they have: blocks being computed are
// finished, those that wait fail with ErrClosed, as do runs that go on.
func (h *Host) Close() {
	h.sleepers.close()
	h.workers.mu.Lock()
	h.workers.closed = true
	h.workers.more.Broadcast()
	h.workers.mu.Unlock()
	h.workers.all.Wait()
}

// workers are the device of a host. Blocks of all runs wait in one first-come
// queue; a run has no more of them in it than it has slots, so none can push the
// others out.
type workers struct {
	all sync.WaitGroup

	mu     sync.Mutex // guards all below
	more   sync.Cond  // the queue grew, or closed
	queue  blocks.Queue
	seats  int // blocks that may be computed at a time, less those that are
	closed bool
}

// Start implements blocks.Device. No worker is woken for a block that the taker of
// its result helps with.
func (p *workers) Start(w *blocks.Work) {
	p.mu.Lock()
	if p.closed || w.Context().Err() != nil {
		p.mu.Unlock()
		end(w)
		return
	}
	defer p.mu.Unlock()
	p.queue.Push(w)
	if p.queue.Head() != w || !w.Offer() {
		p.more.Signal()
	}
}

// end ends a block that is not computed.
func end(w *blocks.Work) {
	err := context.Cause(w.Context())
	if err == nil {
		err = engine.ErrClosed
	}
	w.Done(err, blocks.Times{})
}

// Cancel implements blocks.Canceler.
func (p *workers) Cancel(run context.Context) {
	p.mu.Lock()
	over := p.queue.Take(run)
	p.mu.Unlock()
	for w := over.Pop(); w != nil; w = over.Pop() {
		end(w)
	}
}

// work is a worker: it computes the blocks of every run.
func (p *workers) work() {
	for {
		p.mu.Lock()
		for !p.closed && (p.queue.Head() == nil || p.seats == 0) {
			p.more.Wait()
		}
		closed, w := p.closed, p.queue.Head()
		if w == nil {
			p.mu.Unlock()
			return
		}
		p.pop()
		p.mu.Unlock()
		if closed {
			end(w)
		} else {
			compute(w)
		}
		p.leave()
	}
}

// Help implements blocks.Helper, if a seat is free.
func (p *workers) Help(w *blocks.Work) bool {
	p.mu.Lock()
	if p.queue.Head() != w || p.seats == 0 || p.closed {
		p.mu.Unlock()
		return false
	}
	p.pop()
	p.mu.Unlock()
	compute(w)
	p.leave()
	return true
}

// pop takes the first block and a seat; mu is held. The next block may have been
// queued behind one that woke no worker: its own wake-up then went to the first.
func (p *workers) pop() {
	p.seats--
	if p.queue.Pop(); p.queue.Head() != nil && p.seats > 0 {
		p.more.Signal()
	}
}

// leave gives the seat back.
func (p *workers) leave() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seats++
	if p.queue.Head() != nil {
		p.more.Signal()
	}
}

// compute runs a model's own code on one block.
func compute(w *blocks.Work) {
	begin := time.Now()
	err := context.Cause(w.Context())
	if err == nil {
		err = call(w)
	}
	w.Done(err, blocks.Times{Compute: time.Since(begin)})
}

func call(w *blocks.Work) (err error) {
	defer engine.Recovered(w.Model(), &err)
	if f, ok := w.Program.(RowsFunc); ok {
		return f(w.Context(), w.RowBlock)
	}
	out, err := w.Program.(wholeFunc)(w.Context(), whole(w.RowBlock))
	if err == nil {
		w.Give(out, nil)
	}
	return err
}
