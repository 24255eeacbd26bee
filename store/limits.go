package store

const (
	// MaxName is the maximum length of a name in bytes, as on the wire.
	MaxName = 512
	// MaxMetadata is the maximum length of a tensor's metadata in bytes, keys and values
	// together: less than a small tensor with its page.
	MaxMetadata = 32 << 10
	// MaxSet is the maximum number of tensors in a set: all that a folder holds by default.
	MaxSet = 1 << 16
	// PageNames is how many tensors Each lists at a time, and of how many a store reads the names
	// under one lock (some µs) and matches them in one turn (10 ms for the worst glob).
	PageNames = 1024
	// generatorCache is how many bytes a Generator keeps for its next views: a few chunks
	// of a few pulls.
	generatorCache = 16 << 20
)
