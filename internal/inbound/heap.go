package inbound

import (
	"runtime/debug"
	"runtime/metrics"
)

// ReturnHeap returns a function, to be called every HeapLook, that gives the memory of Go's heap
// that larger messages have left back to the system: the runtime keeps it for minutes, and slabs
// may take all of memory_bytes besides.
func (m *Memory) ReturnHeap() (look func()) {
	kept := int64(0) // what is in the heap beside messages, such as weights
	return func() {
		charged, _, _ := m.Used()
		if heap := heapBytes(); heap > kept+charged+heapSpare {
			debug.FreeOSMemory()
			kept = heapBytes()
		}
		charged, _, _ = m.Used() // of messages that are open: they will go
		kept = min(kept, max(0, heapBytes()-charged))
	}
}

// heapBytes returns what Go's heap has of the system.
func heapBytes() (bytes int64) {
	all := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/memory/classes/heap/unused:bytes"}, {Name: "/memory/classes/heap/free:bytes"}}
	metrics.Read(all)
	for _, m := range all {
		bytes += int64(m.Value.Uint64())
	}
	return bytes
}
