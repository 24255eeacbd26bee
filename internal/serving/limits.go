package serving

import (
	"time"

	"github.com/tensorferry/tensorferry/frame"
)

const (
	// retainChunks is how many unacknowledged result chunks the server retains, which it
	// tells the client: an engine keeps about that many blocks.
	retainChunks = 16
	// tableFree is how many chunks a tensor on credit may have before its chunk table is
	// charged to the memory budget: 20 KiB.
	tableFree = frame.AllowanceChunks
	// allowancesShare: all that is promised takes at most 1/allowancesShare of the budget, which
	// is kept for it.
	allowancesShare = 4
	// smallShare: 1/smallShare of the budget is kept for the runs of small calls, of which
	// smallCalls or more find room there: what they take is about twice their inputs.
	smallShare = 16
	smallCalls = 32
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
