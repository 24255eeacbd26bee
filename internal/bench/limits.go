package bench

const (
	// ChunkBytes is the bytes of one write in most baselines; it is the client's default
	// chunk, too.
	ChunkBytes = 1 << 20
	// SmallPiece is what a raw socket checks while it is in the cache of a core.
	SmallPiece = 256 << 10
	// recordBytes is the payload of a TLS record.
	recordBytes = 16 << 10
	// SmallBytes is the size of a small call's tensor: 7500 float32.
	SmallBytes = 30_000
	// MinRounds is the least number of pairs that a median is taken of.
	MinRounds = 9
	// MaxRounds ends the wait for a stable median: on a machine whose speed keeps
	// changing it would have none.
	MaxRounds = 25
	// StableError is how well a median ratio must be known, as a part of it.
	StableError = 0.05
	// CallBatch is the small calls of one sample: enough for a p99.
	CallBatch = 2000
	// PeakBytes is the most memory of the server's process, and of the client's, while a
	// tensor of any size goes through.
	PeakBytes = 256 << 20
	// MemoryBlock is the bytes that the memory measure writes, reads and compares at a
	// time. It is more than a pipe holds: whoever has the last one still to write is
	// alive.
	MemoryBlock = 1 << 20
)
