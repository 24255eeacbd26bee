package serving

import (
	"time"

	"github.com/tensorferry/tensorferry/assembler"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/slab"
)

const (
	// ownOpen is how many sessions, transfers and calls a caller may have though the
	// server's limit of them is reached: one to use, and others that are ending when it
	// is asked for.
	ownOpen = 4
	// retainChunks is how many unacknowledged result chunks the server asks the
	// client to acknowledge within: an engine keeps about as many blocks.
	retainChunks = 16
	// stagingGrace is how long a session keeps its reservation after its last small
	// call, whoever lacks the memory: longer than most pauses between two calls.
	stagingGrace = time.Second
	// tableFree is how many chunks a tensor on credit may have before what the
	// server keeps per chunk is taken from the memory budget: 20 KiB.
	tableFree = frame.AllowanceChunks
	// reservationsShare: all reservations together fill at most this part (1/reservationsShare)
	// of the budget, so that what is set aside leaves room for what is needed.
	reservationsShare = 2
	// promiseShare: a session is granted at most this part (1/promiseShare) of what is
	// left to be promised, in whole units of promiseUnit bytes.
	promiseShare = 4
	promiseUnit  = 4 << 10
	// retryDelay is what a refused caller is told to wait: about what a call takes.
	retryDelay  = time.Second
	retryMillis = uint32(retryDelay / time.Millisecond)
	// drainPoll is how often Drain looks whether the last request has been answered;
	// nothing else waits for it.
	drainPoll = 10 * time.Millisecond
	// modelGauges is how many gauges of a model are shown: a label for each.
	modelGauges = 32
	// maxTimeout bounds a call's own timeout, so that its milliseconds fit a Duration.
	maxTimeout = 365 * 24 * time.Hour
)

// reservation is what the budget reserves for the allowance of a session: one tensor
// of all its bytes, and of as many chunks as it may have.
func reservation(allowance uint32) int64 {
	return slab.SizeOf(int64(allowance)) + frame.AllowanceChunks*assembler.ChunkOverhead
}
