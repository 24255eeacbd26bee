// Package cpu runs models in host memory: Go functions, stack
// models from folders, and a few built-in ones. It is pure Go on gonum's BLAS.
//
// A result is bit-identical however the input was cut into chunks and blocks: the float32
// arithmetic of a row never depends on the rows it is computed with. float16, bfloat16 and
// float64 tensors are computed in float32 too and rounded to nearest even; only the built-in
// models keep float64. Blocks run on the workers of a Host, which owns their memory.
package cpu

import (
	"cmp"
	"runtime"

	"github.com/tensorferry/tensorferry/engine/blocks"
	"github.com/tensorferry/tensorferry/slab"
)

// HostConfig says what a Host may use. The zero value works.
type HostConfig struct {
	// MemoryBytes is the most memory that runs may hold at a time, and the most
	// that is kept for reuse. Zero means 1 GiB.
	MemoryBytes int64
	// Workers is the number of blocks computed at a time, beside those of stack models
	// that take longer than 2 ms, of which as many take turns, and one for each caller with
	// a block that takes longer than a second. Zero means GOMAXPROCS.
	Workers int
}

// Host is what models in host memory share: a pool of slabs, the budget that
// bounds it, and the workers that compute blocks. Safe for concurrent use.
type Host struct {
	pool    *slab.Pool
	budget  *slab.Budget
	kept    *slab.Budget // what sequences may have of budget
	workers *workers
	engine  *blocks.Engine
}

// NewHost returns a host and starts its workers, which end with Close.
func NewHost(c HostConfig) *Host {
	memory := cmp.Or(max(c.MemoryBytes, 0), defaultMemory)
	h := &Host{
		pool: slab.NewPool(memory, slab.System), budget: slab.NewBudget("memory", memory),
		kept:    slab.NewBudget("sequence", memory/keptShare),
		workers: newWorkers(cmp.Or(max(c.Workers, 0), runtime.GOMAXPROCS(0))),
	}
	h.engine = blocks.New(blocks.Config{Name: "cpu", Device: h.workers, Pool: h.pool, Budget: h.budget})
	return h
}

// Pool returns the pool that every block of the host's models comes from.
func (h *Host) Pool() *slab.Pool { return h.pool }

// Budget returns the budget that every run of the host's models is admitted by.
func (h *Host) Budget() *slab.Budget { return h.budget }

// Close ends the workers and returns when they have: blocks being computed are
// finished, those that wait fail with ErrClosed, as do runs that go on.
func (h *Host) Close() { h.workers.close() }
