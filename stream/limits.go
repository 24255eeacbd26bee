package stream

import "github.com/tensorferry/tensorferry/terms"

const (
	// pendingControl limits the answers that wait because the peer does not read, and
	// pendingBytes their texts.
	pendingControl = 2048
	// answerBytes is what an answer takes in addition to its text.
	answerBytes  = 400
	pendingBytes = 512 << 10
	// openingBytes is the largest chunk in the frame that opens its call, which must not come late.
	openingBytes = 32 << 10
	// laneRetain is how many chunks a sender with lanes wants to have acknowledged
	// together. When a lane breaks, at most that many are sent again, in addition to those
	// in flight.
	laneRetain = 64
	// tickEvery is how often the slow timers are checked at least while calls are open.
	tickEvery = 1 * terms.Second
	// lateFrames is how long a session without calls still expects late frames of ended
	// calls; then it forgets those calls.
	lateFrames = 10 * terms.Second
)
