package bench

import "time"

const (
	// ChunkBytes is the bytes of one write in most baselines; it is the client's default
	// chunk, too.
	ChunkBytes = 1 << 20
	// SmallBytes is the size of a small call's tensor: 7500 float32.
	SmallBytes = 30_000
	// Many is how many tensors a push or a pull of many has.
	Many = 10_000
	// MinRounds is the least number of pairs that a median is taken of.
	MinRounds = 9
	// MaxRounds ends the wait for a stable median: on a machine whose speed keeps
	// changing it would have none.
	MaxRounds = 25
	// StableError is how well a median ratio must be known, as a part of it.
	StableError = 0.05
	// CallBatch is the small calls of one sample: enough for a p99.
	CallBatch = 2000
	// jobWait is how long one job may take before the run is given up: a tensor of
	// 256 MiB at 2 MB/s.
	jobWait = 2 * time.Minute
)

// peakBytes is the most memory of the server's process, and of the client's, while a
// tensor of any size goes through.
const peakBytes = 256 << 20

// MemoryBlock is the bytes that the memory measure writes, reads and compares at a
// time. It is more than a pipe holds: whoever has the last one still to write is
// alive.
const MemoryBlock = 1 << 20
