package failures

import "time"

const (
	// kept is how many failures a Log has, and of how many models they are logged apart: all others are
	// one. causeBytes is how long the cause of one may be.
	kept       = 1024
	causeBytes = 1 << 10
	// placeBytes is how much of a place tells one kind from another: a worker could say much.
	placeBytes = 256
	// traceBytes is how much of the end of a trace is logged.
	traceBytes = 16 << 10
	// retryMillis is how long a refused caller is told to wait: about as long as a call takes.
	retryMillis = uint32(time.Second / time.Millisecond)
)
