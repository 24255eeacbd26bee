package bench

const (
	// ChunkBytes is the bytes of one write, and of one chunk, in every baseline;
	// it is the client's default too.
	ChunkBytes = 1 << 20
	// SmallBytes is the size of a small call's tensor: 7500 float32.
	SmallBytes = 30_000
	// MinPairs is the least number of pairs that a median is taken of.
	MinPairs = 9
	// MaxPairs ends the wait for a stable median: on a machine whose speed keeps
	// changing it would have none.
	MaxPairs = 25
	// StableError is how well a median ratio must be known, as a part of it.
	StableError = 0.05
	// PingBatch is the small calls of one sample: enough for a p99.
	PingBatch = 2000
	// uploadsBeside bounds how many uploads small calls are made beside, to
	// collect PingBatch of them.
	uploadsBeside = 25
	// copyBytes is what a file is copied in pieces of: cp's, or two of an older one's.
	copyBytes = 256 << 10
	// hostTensors: the server of a measure may hold so many large tensors.
	hostTensors = 4
	// hostSpare is its memory beyond them, for blocks.
	hostSpare = 64 << 20
)

// required holds over TCP on loopback with two cores, by work and peer.
var required = map[[2]string]Required{
	{string(Upload), "raw-crc"}: {Value: 0.85},
	{string(Echo), "raw-crc"}:   {Value: 0.70},
	{string(Upload), "grpc"}:    {Value: 1.6},
	{string(Echo), "grpc"}:      {Value: 1.2},
	{call, "grpc"}:              {Value: 1.5, AtMost: true},
	{pull, "raw-crc"}:           {Value: 0.80},
	{push, "cp"}:                {Value: 0.60},
}

const (
	// firstToTotal is the most that a relu's first result may take of its call.
	firstToTotal = 0.05
	// peakBytes is the most memory of the server's process, and of the client's,
	// while a tensor of any size goes through.
	peakBytes = 256 << 20
)

// MemoryBlock is the bytes that the memory measure writes, reads and compares at a
// time. It is more than a pipe holds: whoever has the last one still to write is
// alive.
const MemoryBlock = 1 << 20
