package folder

const (
	// DefaultMaxTensors is the default limit of tensors in a folder: each has a file, and
	// they are opened one by one at start-up (3 s).
	DefaultMaxTensors = 1 << 16
	// allMetadata is the maximum length of the metadata of all tensors of a folder, which
	// stays in memory.
	allMetadata = 64 << 20
	// writeBack is how many bytes of a growing file are sent to the disk at a time, so that
	// Commit has little to wait for.
	writeBack = 8 << 20
	// nameLocks is how many names can be committed, opened or deleted concurrently, if their
	// hashes differ.
	nameLocks = 64
)
