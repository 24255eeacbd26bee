package kpu

import "time"

const (
	// MessageBytes is the largest message received: gRPC's default, and so that of the
	// contract's own clients and servers.
	MessageBytes = 4 << 20
	// Idle is how long a client may be silent: the contract has no limit.
	Idle = time.Hour
	// chunkBytes is the size of the chunks sent: what the contract's own server sends.
	chunkBytes = 1 << 20
	// ringBytes is how much of a result waits for its client while the model goes on.
	ringBytes = 8 << 20
	// ringExtra is what a result that waits may have beyond its input.
	ringExtra = 64 << 10
	// idBytes is the longest id of a tensor: it comes back with every chunk.
	idBytes = 4 << 10
	// answerBytes is how many bytes of ids an answer of ReceiveTensors has: 29 000 ids of 36.
	answerBytes = 1 << 20
)

// limits are those of one RPC that a test can reach only if they are lower.
type limits struct {
	open   int           // tensors that are incomplete, or whose result is not sent: state of each
	chunks int64         // of the incomplete tensors, 40 bytes each; and of a tensor that is sent: 16 GiB
	unread time.Duration // how long a result waits for its client to read some of it
	silent time.Duration // how long an incomplete tensor waits for a chunk of any: 4 MiB at 35 KB/s
}

var defaults = limits{open: 16, chunks: 16 << 10, unread: time.Minute, silent: 2 * time.Minute}
