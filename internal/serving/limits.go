package serving

import (
	"time"

	"github.com/tensorferry/tensorferry/assembler"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/slab"
)

const (
	// retainChunks is how many unacknowledged result chunks the server retains, which it
	// tells the client: an engine keeps about that many blocks.
	retainChunks = 16
	// stagingGrace is how long a session keeps its reservation after its last small call,
	// even if others need the memory: longer than most pauses between two calls.
	stagingGrace = time.Second
	// tableFree is how many chunks a tensor on credit may have before its chunk table is
	// charged to the memory budget: 20 KiB.
	tableFree = frame.AllowanceChunks
	// reservationsShare: all that is promised, and so all reservations together, takes at most
	// 1/reservationsShare of the budget, to leave room for memory that is needed now.
	reservationsShare = 2
	// promiseShare: a session is granted at most 1/promiseShare of what can still be
	// promised, in multiples of promiseUnit bytes.
	promiseShare = 4
	promiseUnit  = 4 << 10
	// retryMillis is how long a refused caller is told to wait: about as long as a call takes.
	retryMillis = uint32(time.Second / time.Millisecond)
	// modelGauges is how many gauges of a model are shown; each is a label.
	modelGauges = 32
	// maxTimeout limits the timeout of a call, so that its milliseconds fit into a Duration.
	maxTimeout = 365 * 24 * time.Hour
)

// reservation returns how many bytes of the budget are reserved for a session's allowance:
// a single tensor of that size, with as many chunks as allowed.
func reservation(allowance uint32) int64 {
	return slab.SizeOf(int64(allowance)) + frame.AllowanceChunks*assembler.ChunkOverhead
}
