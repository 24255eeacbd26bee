package serving

const (
	// retainChunks is how many unacknowledged result chunks the server retains, which it
	// tells the client: an engine keeps about that many blocks.
	retainChunks = 16
	// allowancesShare: all that is promised takes at most 1/allowancesShare of the budget, which
	// is kept for it.
	allowancesShare = 4
	// smallShare: 1/smallShare of the budget is kept for the runs of small calls, of which
	// smallCalls or more find room there: what they take is about twice their inputs.
	smallShare = 16
	smallCalls = 32
	// promiseShare: a session is granted at most 1/promiseShare of what can still be
	// promised.
	promiseShare = 4
	// modelGauges is how many gauges of a model are shown; each is a label.
	modelGauges = 32
)
