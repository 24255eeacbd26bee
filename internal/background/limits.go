package background

import "time"

const (
	// turnTime is how long a turn lasts while others wait, and how long one who waits behind
	// forty others waits for each: ten chunks that are hashed, or four pieces that are generated.
	turnTime = 2 * time.Millisecond
	// PieceBytes are generated, parsed, hashed, converted, inflated or deflated at a time: in a
	// millisecond or two. For no more, no turn is taken.
	PieceBytes = 64 << 10
)
