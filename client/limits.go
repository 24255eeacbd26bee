package client

import "time"

const (
	mib = 1 << 20
	// slots is how many chunks a streamed input is read ahead: enough for a round trip of a
	// few milliseconds.
	slots = 8
	// smallChunks times as many are, of chunks that are as many times smaller than 1 MiB: the
	// chunks of a call that makes small rows would leave a far line empty.
	smallChunks = 128
	// lateChunks is about how many chunks an input has at most whose first item is late: nobody
	// knows how large items will be.
	lateChunks = 4096
	// pushTensors is how many tensors of a push may be on their way, of half of those that
	// the server keeps open; pushPieces is how many pieces of one, of 1 MiB or a chunk.
	pushTensors = 32
	pushPieces  = 16
	pushBytes   = 16 * mib // of tensors on their way, unless one alone is larger or the server is far
	// requestNames is how many names or globs one request has: as many as a server takes.
	requestNames = 1024
	// pullTensors limits the tensors of a pull with a glob, each of which takes a few
	// hundred bytes and its name: a server's folder holds as many by default.
	pullTensors = 1 << 16
	// pullTextBytes limits the texts kept from a pull's summaries, of which there may be
	// pullTensors of 4 KiB each. Texts beyond it are truncated.
	pullTextBytes = 1 * mib
	// tellWait is how long a pull waits for the server to know of a tensor that is damaged.
	tellWait = 1 * time.Second
	// silentRate is the rate, in bytes per second, that a server is expected to reach where
	// the protocol keeps it silent: while it reads held ranges for the digest, and while it
	// syncs what was pushed. A slow disk reaches it.
	silentRate = 32 * mib
	// listTensors and listBytes limit the result of List: sixteen times as many tensors as
	// a server's folder holds by default, and their size on the wire.
	listTensors = 1 << 20
	listBytes   = 256 * mib
	// tensorBytes is the largest tensor received: the largest that a server stores by
	// default. ResultBytes limits those in memory.
	tensorBytes = 1 << 40
	// laneBytes is the smallest tensor for which a session opens lanes: connecting costs
	// as much as sending a few hundred KiB on one machine, and takes round trips over a
	// network.
	laneBytes = 4 * mib
	// mostLanes is the most lanes of a session: with 0.1 % lost, 32 fill 1 Gbit/s over 50 ms.
	mostLanes = 64
	// farLanes is how many lanes a session begins with where the round trip is not less than
	// lane.Far: four by CUBIC, whose windows shrink by three tenths, left a fifth of a line
	// of 100 ms empty. It then doubles them as long as that carries laneGain times as much.
	farLanes = 8
	laneGain = 1.1
	// laneLooks is how many looks in a row must find less gain for that to end. One is enough
	// when packets never wait less than 1/fullShare of a round trip, and fullLeast, or one in a
	// hundred, and fullLost, were sent again. It begins again after laneLooks at less than
	// laneHold of the most that was carried.
	laneLooks = 3
	fullShare = 10
	fullLeast = 1 * time.Millisecond
	fullLost  = 10
	laneHold  = 0.9
	// farChunk is the size of chunks sent where the round trip is farTrip or more: one of n
	// lanes takes n times as long for a chunk as the line, and holds a model's memory meanwhile.
	farChunk = 256 << 10
	farTrip  = 10 * time.Millisecond
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
	// mostFailures is how many failures a server may list; ours keep 1024.
	mostFailures = 1 << 16
	// longest is the longest duration that Statistics tells from a longer one.
	longest = 24 * time.Hour
	// breakFor is how long a client makes no attempt after Config.BreakAfter of them.
	breakFor = 10 * time.Second
	// redialEvery is how often a client dials a server that it cannot reach while callers try.
	redialEvery = 200 * time.Millisecond
	// readyWait is how long a new connection may take to show that a server is there, after
	// a connection has failed before.
	readyWait = 1 * time.Second
	// signs is how many times per idle timeout of the server the client reports that it
	// waits for its own input or output. The interval is at most mostSign, which also
	// applies if the timeout is unknown, and at least leastSign, whatever the server says.
	signs     = 3
	mostSign  = 10 * time.Second
	leastSign = 10 * time.Millisecond
	// poolBytes is how much released slot memory a client keeps for reuse.
	poolBytes = 64 * mib
)

// Defaults of Config.
const (
	// DefaultWindow is the server's default, too; see there for the reason.
	DefaultWindow      = 2 * mib
	DefaultOpenTimeout = 10 * time.Second
	// DefaultStallTimeout is twice the server's own timeout, whose error says more.
	DefaultStallTimeout = 60 * time.Second
	DefaultResultBytes  = 4 << 30
	DefaultRetryFor     = 60 * time.Second
)
