package serve

import (
	"errors"
	"math"
	"os"
	"runtime/debug"

	"github.com/KimMachineGun/automemlimit/memlimit"

	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/memory"
)

const (
	// unknownMemory is assumed if the machine's memory is unknown.
	unknownMemory = 4 << 30
	// leastHeap is the lowest limit for Go's memory: with less, Go would only collect garbage.
	leastHeap = 64 << 20
	// heapReserve: 1/heapReserve of the process's memory is reserved for what is not
	// counted: C stacks, the kernel's socket buffers, file pages.
	heapReserve = 16
)

// processMemory returns the memory that this process may use.
func processMemory() int64 {
	least, _, _ := memoryLimit(memlimit.FromCgroup, memlimit.FromSystem)
	return least
}

// memoryLimit returns the least of GOMEMLIMIT and what is known of control groups and the machine,
// which of them that is, and why the limit of the group, if there is one, cannot be seen.
func memoryLimit(group, machine memlimit.Provider) (least int64, from string, unseen error) {
	least, from = debug.SetMemoryLimit(-1), "GOMEMLIMIT"
	n, err := group()
	if err == nil && n > 0 && n < uint64(least) {
		least, from = int64(n), "control group"
	} else if err != nil && !errors.Is(err, memlimit.ErrNoLimit) {
		unseen = err
	}
	if n, err := machine(); err == nil && n > 0 && n < uint64(least) {
		least, from = int64(n), "machine"
	}
	if least == math.MaxInt64 {
		least, from = unknownMemory, "nothing: it is assumed"
	}
	return least, from, unseen
}

// limitHeap has Go collect garbage before the process exceeds its memory, unless GOMEMLIMIT is set.
func limitHeap(e *engines, s *server.Server, tensors store.Store) {
	if os.Getenv("GOMEMLIMIT") != "" {
		return
	}
	outside := e.cfg.memory + e.cfg.pinned + s.ReceiveLimit()
	if m, ok := tensors.(*memory.Store); ok {
		_, limit := m.Used()
		outside += limit
	}
	debug.SetMemoryLimit(heapLimit(processMemory(), outside))
}

// heapLimit returns the limit for Go's heap, of all memory with a part outside the heap.
func heapLimit(all, outside int64) int64 {
	return max(all-all/heapReserve-outside, leastHeap)
}
