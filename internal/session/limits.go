package session

import (
	"time"

	"github.com/tensorferry/tensorferry/stream"
)

const (
	// writeStall is how long one frame may wait for the peer to read before the
	// session ends: credit bounds memory, this bounds patience.
	writeStall = 30 * time.Second
	// whyWait is how long the end of a context waits for its reason: the reader has it, unless
	// it is still at a store.
	whyWait = 100 * time.Millisecond
	// drainPoll is how often Drain looks whether the last call has ended; only
	// shutting down waits for it.
	drainPoll = 10 * time.Millisecond
	// PieceBytes is what a put or a get lends, offers and hashes at a time, or a chunk if that
	// is larger: large enough that a lock for each costs nothing.
	PieceBytes = 1 << 20
	// Slabs is how many pieces a tensor has that does not rest in memory, enough for a round
	// trip of a few milliseconds, and landingPieces how many are lent of one that does: more
	// is hashed again if a chunk is missing.
	Slabs         = 8
	landingPieces = 64
	// farTrip is the round trip from which more is lent and offered ahead: what the constants
	// above allow lasts for shorter ones.
	farTrip = time.Millisecond
	// yieldEvery is how long a goroutine of a lane may run before it yields; see yield.
	yieldEvery = stream.Instant(500 * time.Microsecond)
)
