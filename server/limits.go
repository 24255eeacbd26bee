package server

import "time"

const (
	// lookEvery is how often the senders of open RPCs are asked about, and the health of the store is
	// looked at, and how long that may take: it costs a folder with files of others that changes up
	// to 60 ms.
	lookEvery = 5 * time.Second
	// dropMost, dropBytes and dropIdle limit how long a client that still writes is read after
	// its RPC has failed; dropIdle is several times what a busy client takes for a message.
	dropMost  = 1 * time.Second
	dropBytes = 16 << 20
	dropIdle  = 50 * time.Millisecond
	// An RPC with a deadline ends earlier by 1/earlyShare of it, and by the times below at least and
	// at most: what a busy server takes to write its status, and what clients do not notice.
	earlyShare = 20
	earlyLeast = time.Millisecond
	earlyMost  = 50 * time.Millisecond
	// An answer of ListFailures has at most failuresPage of them: 1 KiB and a name each, encoded.
	failuresPage = 256
	// requestFree is the size up to which a request, or an output, is not charged to a budget:
	// 8 MiB for as many calls as a server has by default. A probe sends no larger one.
	requestFree = 4 << 10
	// requestParts is how many names, ranges, parameters and the like a request may have
	// that is not part of a session or a push: 2 MB in memory. A pull that holds more
	// ranges must be split in two.
	requestParts = 16 << 10
	// computeBytes is the maximum size of the one message of Compute, in each direction, and what is
	// left of what small calls may have by what is larger.
	computeBytes = 1 << 20
	// An answer of ListTensors has at most listPage tensors, with listBytes of names and shapes.
	listPage  = 1000
	listBytes = 128 << 10
	// foundBytes is what DeleteTensors keeps per tensor that it finds, beside its name.
	foundBytes = 128
	// receiveShare: what clients have sent and nothing has consumed may take 1/receiveShare
	// of the budget's bytes, in addition to the budget.
	receiveShare = 2
)

// Default limits of a server. GetServiceInfo shows all but DefaultCloseWait and DefaultDrainWait.
const (
	DefaultMemory      = 1 << 30 // of Config.Pool and Budget
	DefaultSessions    = 10_000  // sessions at a time
	DefaultConnections = 1024    // connections at a time: each takes goroutines, buffers and a descriptor
	DefaultTransfers   = 256     // pushes and pulls at a time
	DefaultLanes       = 64      // lanes of a session at a time: as many fill a road that loses one packet in a thousand
	// DefaultStoredBytes is the largest tensor pushed: 1 TiB, as many chunks of 1 MiB as a
	// tensor may have. A store in memory has a limit of its own.
	DefaultStoredBytes = 1 << 40
	DefaultQueuedCalls = 1024 // calls at a time, of all sessions
	// DefaultThinFrames per second cost about 3 % of a core. Acknowledging results at 4
	// GB/s takes 2,000 per second.
	DefaultThinFrames      = 10_000
	DefaultStreamsPerConn  = 128      // gRPC streams of one connection; grpc-go's default is no limit
	DefaultHeaderListBytes = 16 << 10 // HTTP/2 header list; grpc-go's default is 16 MiB
	// DefaultWindow is how many bytes may be in flight to one RPC. By default grpc-go lets
	// the window grow to 16 MiB on a fast network; the bytes are then cold in the cache
	// when they are read: uploads ran at half the rate in every other process, and small
	// calls queued behind 16 MiB. 2 MiB is the L2 cache of one core, and carries 100 MB/s
	// over a round trip of 20 ms (measured November 2026).
	DefaultWindow           = 2 << 20
	DefaultHandshake        = 10 * time.Second // a silent connection does not hold a descriptor for longer
	DefaultKeepalive        = 30 * time.Second // idle time before a ping
	DefaultKeepaliveTimeout = 10 * time.Second // time to answer the ping
	DefaultKeepaliveMin     = 10 * time.Second // minimum time between a client's pings
	DefaultMemoryWait       = 30 * time.Second // time that a call waits for memory
	DefaultDrainWait        = 10 * time.Second // time that open calls have to end when ListenAndServe's ctx ends
	DefaultCloseWait        = 5 * time.Second  // time that shutting down waits for what was cancelled
)
