package session

import (
	"time"

	"github.com/tensorferry/tensorferry/stream"
)

const (
	// writeStall is how long one frame may wait for the peer to read before the
	// session ends: credit bounds memory, this bounds patience.
	writeStall = 30 * time.Second
	// drainPoll is how often Drain looks whether the last call has ended; only
	// shutting down waits for it.
	drainPoll = 10 * time.Millisecond
	// yieldEvery is how long a goroutine of a lane may run before it yields; see yield.
	yieldEvery = stream.Instant(500 * time.Microsecond)
)
