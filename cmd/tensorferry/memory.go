package main

import (
	"fmt"
	"io/fs"
	"math"
	"os"
	"path"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"

	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/store"
)

const (
	// unknownMemory is assumed if the machine's memory is unknown.
	unknownMemory = 4 << 30
	// leastHeap is the lowest limit for Go's memory. With less, Go would do little but
	// collect garbage.
	leastHeap = 64 << 20
	// heapReserve: 1/heapReserve of the process's memory is reserved for what is not
	// counted: C stacks, the kernel's socket buffers, file pages.
	heapReserve = 16
)

// processMemory returns the memory that this process may use: the least of GOMEMLIMIT, its
// control groups and the machine. root is the root of the file system.
func processMemory(root fs.FS) int64 {
	least := min(debug.SetMemoryLimit(-1), groupMemory(root), machineMemory(root))
	if least == math.MaxInt64 {
		return unknownMemory
	}
	return least
}

// limitHeap has Go collect garbage before the process exceeds its memory, unless GOMEMLIMIT is set.
func limitHeap(e *engines, s *server.Server, tensors store.Store) {
	if os.Getenv("GOMEMLIMIT") != "" {
		return
	}
	outside := e.cfg.memory + e.cfg.pinned + s.ReceiveLimit()
	if m, ok := tensors.(*store.Memory); ok {
		_, limit := m.Used()
		outside += limit
	}
	debug.SetMemoryLimit(heapLimit(processMemory(os.DirFS("/")), outside))
}

// heapLimit returns the limit for Go's heap, of all memory with a part outside the heap.
func heapLimit(all, outside int64) int64 {
	return max(all-all/heapReserve-outside, leastHeap)
}

// machineMemory returns the machine's memory, or MaxInt64 if it is unknown.
func machineMemory(root fs.FS) int64 {
	text, _ := fs.ReadFile(root, "proc/meminfo") // empty if it does not exist
	for line := range strings.Lines(string(text)) {
		var kB int64
		if n, _ := fmt.Sscanf(line, "MemTotal: %d kB", &kB); n == 1 {
			return kB << 10
		}
	}
	return math.MaxInt64
}

// groupMemory returns the least memory limit of the process's control group and its
// parents, version 1 or 2, or MaxInt64 if there is none. It skips groups that are not
// mounted, as in a container.
func groupMemory(root fs.FS) int64 {
	least := int64(math.MaxInt64)
	text, _ := fs.ReadFile(root, "proc/self/cgroup") // empty if it does not exist
	for line := range strings.Lines(string(text)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3) // number:controllers:/path
		if len(f) < 3 {
			continue
		}
		top, name := "sys/fs/cgroup", "memory.max"
		if f[0] != "0" || f[1] != "" { // version 1
			if !slices.Contains(strings.Split(f[1], ","), "memory") {
				continue
			}
			top, name = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
		}
		for group := path.Clean("/" + f[2]); ; group = path.Dir(group) {
			text, _ := fs.ReadFile(root, path.Join(top, group, name)) // a number, "max", or not there
			if n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil {
				least = min(least, n)
			}
			if group == "/" {
				break
			}
		}
	}
	return least
}
