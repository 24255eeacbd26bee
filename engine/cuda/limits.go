package cuda

import "time"

const (
	// lanes is how many blocks are on a device at a time: one coming in, one being
	// computed, one going out, and as many as come in until the host is awake and has
	// said that one is done. An H200 moved 16 GB/s each way with 4 of 1 MiB, 36 with 8,
	// and no more with 12 (November 2026, the best of several runs).
	lanes = 8
	// timedEvery is how many blocks of a call there are to one that is timed: an event
	// with a time costs a stream several microseconds, one without hardly any.
	timedEvery = 16
	// laneUnit divides the device memory of a lane: blocks of nearly one size share it.
	laneUnit = 2 << 20
	// laneMost is about the most that a block of a stack model takes of a lane, if its
	// rows are not wider: a few times what comes in and goes out.
	laneMost = 8 << 20
	// hangWait is a thousand times what a block of the largest model takes.
	hangWait = 30 * time.Second
	// openHangs is how many times hangWait a device has to open: a driver starts every GPU
	// of the machine before it answers, which takes seconds each.
	openHangs = 4
	// textBytes has room for what the driver's compiler says of a faulty image.
	textBytes = 4 << 10
	// pieceBytes is how much memory is locked at a time: 16 MiB took 1 to 2.7 ms on an H200,
	// 1 MiB 0.3. Pieces are cut into granules, the pages of most systems.
	pieceBytes = 16 << 20
	granule    = 4 << 10
)
