package session

import "time"

const (
	// writeStall is how long one frame may wait for the peer to read before the
	// session ends: credit bounds memory, this bounds patience.
	writeStall = 30 * time.Second
	// drainPoll is how often Drain looks whether the last call has ended; only
	// shutting down waits for it.
	drainPoll = 10 * time.Millisecond
)
