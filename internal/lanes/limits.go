package lanes

import "time"

const (
	// laneBytes is the smallest tensor for which a session opens lanes: connecting costs
	// as much as sending a few hundred KiB on one machine, and takes round trips over a
	// network.
	laneBytes = 4 << 20
	// farLanes is how many lanes a session begins with where the round trip is not less than
	// lane.Far: four by CUBIC, whose windows shrink by three tenths, left a fifth of a line
	// of 100 ms empty. It then doubles them as long as that carries laneGain times as much.
	farLanes = 8
	laneGain = 1.1
	// laneLooks is how many looks in a row must find less gain for that to end. One is enough
	// when packets never wait less than 1/fullShare of a round trip, and lane.Far, or one in a
	// hundred, and fullLost, were sent again. It begins again after laneLooks at less than
	// 1/laneGain of the most that was carried.
	laneLooks = 3
	fullShare = 10
	fullLost  = 10
	// A look at what lanes carry takes roadTrips round trips, but at least roadLeast and at
	// most roadMost: a new one has about filled its window by then.
	roadTrips = 4
	roadLeast = 100 * time.Millisecond
	roadMost  = 2 * time.Second
	// laneWait plus the time that the session took to open is the time limit for opening a
	// lane; nothing waits for it.
	laneWait = 1 * time.Second
	// laneTries is how many times in a row a lane may be refused, as it is behind a load
	// balancer, or break before it has carried laneBytes, or stall. Each attempt starts
	// laneWait later than the one before. Then the client makes no more attempts for
	// laneMemoryTime, which is also how long it knows how many lanes were worth it.
	laneTries      = 3
	laneMemoryTime = 10 * time.Minute
	// farTrip is the round trip from which chunks are smaller.
	farTrip = 10 * time.Millisecond
)
