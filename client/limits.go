package client

import "time"

const (
	// requestNames is how many names or globs one request has: as many as a server takes.
	requestNames = 1024
	// tellWait is how long a pull waits for the server to know of a tensor that is damaged, and
	// an RPC for a new connection to show that a server is there, when one has failed before.
	tellWait = 1 * time.Second
	// listTensors and calling.ListBytes limit the result of List: sixteen times as many tensors
	// as a server's folder holds by default, and their size on the wire.
	listTensors = 1 << 20
	// tensorBytes is the largest tensor received: the largest that a server stores by
	// default. ResultBytes limits those in memory.
	tensorBytes = 1 << 40
	// mostLanes is the most lanes of a session: with 0.1 % lost, 32 fill 1 Gbit/s over 50 ms.
	mostLanes = 64
	// farChunk is the size of chunks sent where the round trip is lanes.FarTrip or more: one of n
	// lanes takes n times as long for a chunk as the line, and holds a model's memory meanwhile.
	farChunk = 256 << 10
	// longest is the longest duration that Statistics tells from a longer one.
	longest = 24 * time.Hour
	// breakFor is how long a client makes no attempt after Config.BreakAfter of them.
	breakFor = 10 * time.Second
	// redialEvery is how often a client dials a server that it cannot reach while callers try.
	redialEvery = 200 * time.Millisecond
	// poolBytes is how much released slot memory a client keeps for reuse.
	poolBytes = 64 << 20
)

// Defaults of Config.
const (
	// DefaultWindow is the server's default, too; see there for the reason.
	DefaultWindow      = 2 << 20
	DefaultOpenTimeout = 10 * time.Second
	// DefaultStallTimeout is twice the server's own timeout, whose error says more.
	DefaultStallTimeout = 60 * time.Second
	DefaultResultBytes  = 4 << 30
	DefaultRetryFor     = 60 * time.Second
)
