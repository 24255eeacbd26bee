package flow

import "github.com/tensorferry/tensorferry/terms"

const (
	// smallRun is how many chunks of small tensors may be sent before a large one gets a
	// turn, so that a flood of small calls does not stop it.
	smallRun = 8
	// ackShare: an acknowledgement is due when 1/ackShare of what the sender can retain has
	// arrived.
	ackShare = 4
	// lazyAck is how long an acknowledgement or a credit that nobody waits for may be
	// delayed, to be sent along with another frame.
	lazyAck = 20 * terms.Millisecond
	// roadLook is how often the rate of a road is looked at, at most.
	roadLook = 100 * terms.Millisecond
	// laneRest is how long a side sends nothing by lanes after one has stalled for the first
	// time: each such time costs several seconds.
	laneRest = 60 * terms.Second
	// laneAhead, for each lane, is what the others can carry while one is slow with an earlier
	// chunk.
	laneAhead = 4 << 20
	// aheadMost bounds what is lent, or offered, ahead of one tensor: what moves in two round
	// trips of 100 ms at 10 Gbit/s.
	aheadMost = 256 << 20
	// frameParts is the most control parts of a kind in one frame, and the most chunks that
	// an acknowledgement asks for again.
	frameParts = 64
	// FrameBytes is the size at which a frame gets no more control parts. The receiver
	// accepts 64 KiB, so one part more than counted always fits.
	FrameBytes = 24 << 10
)
