package server

import (
	"time"

	"github.com/tensorferry/tensorferry/stream"
)

// unread is how long what was sent may lie unread until its connection is closed, or
// up to twice as long: the RPC has been told before.
func unread(l stream.Limits) time.Duration { return 2 * time.Duration(min(l.ChunkIdle, 1<<61)) }

const (
	// requestFree is how much of each counts in no budget, if it is no more, or if it is
	// what an answer has more than its request: 4 MiB for as many calls as a server has
	// by default.
	requestFree = 4 << 10
	// unreadAnswers is how many answers of one stream, which are not frames, may lie
	// unread: each keeps 4 KiB, however small it is.
	unreadAnswers = 16
	// requestParts is how many names, ranges, parameters and the like a request that
	// is not a session's or a push's may have: 2 MB in memory. A pull with as many
	// ranges held as it takes is cut into two.
	requestParts = 16 << 10
	// computeBytes is the most that goes into the one message of Compute, each way.
	computeBytes = 1 << 20
	// listPage is the most tensors in one answer of ListTensors, and listBytes the most of
	// their names and shapes.
	listPage  = 1000
	listBytes = 128 << 10
	// foundBytes is what DeleteTensors keeps of a tensor that it finds, beside its name.
	foundBytes = 128
	// receiveShare: what clients have sent and nothing has consumed may take this part
	// (1/receiveShare) of the budget's bytes, beside them.
	receiveShare = 2
)

// Limits of a server, by default. Each is visible in GetServiceInfo.
const (
	DefaultSessions    = 10_000 // sessions at a time
	DefaultConnections = 1024   // connections at a time: goroutines, buffers and a descriptor of each
	DefaultTransfers   = 256    // pushes and pulls at a time
	// DefaultStoredBytes is the largest tensor pushed: 1 TiB, as many chunks of
	// 1 MiB as a tensor may have. A store in memory has a limit of its own.
	DefaultStoredBytes = 1 << 40
	DefaultQueuedCalls = 1024 // calls at a time, of all sessions
	// DefaultThinFrames a second cost about a thirtieth of a core. Acknowledgements of
	// results at 4 GB/s are 2 000.
	DefaultThinFrames      = 10_000
	DefaultStreamsPerConn  = 128      // gRPC streams of one connection; grpc-go's default is no limit
	DefaultHeaderListBytes = 16 << 10 // HTTP/2 header list; grpc-go's default is 16 MiB
	// DefaultWindow is bytes on their way to one RPC. Left to itself grpc-go
	// lets the window grow to 16 MiB on a fast network, and then the bytes are cold
	// when they are read: uploads ran at half the rate in every other process, and
	// small calls queued behind 16 MiB. 2 MiB is the L2 cache of one core, and
	// carries 100 MB/s over a round trip of 20 ms (measured November 2026).
	DefaultWindow           = 2 << 20
	DefaultHandshake        = 10 * time.Second // a connection that says nothing holds no descriptor
	DefaultKeepalive        = 30 * time.Second // ping an idle connection
	DefaultKeepaliveTimeout = 10 * time.Second // close it when the ping is not answered
	DefaultKeepaliveMin     = 10 * time.Second // the least time between a client's pings
	DefaultMemoryWait       = 30 * time.Second // a call waits for memory before it is refused
	DefaultCloseWait        = 5 * time.Second  // shutting down waits for what was cancelled
)
