package folder

import "github.com/tensorferry/tensorferry/store"

const (
	// DefaultMaxTensors is the default limit of tensors in a folder: each has a file, and
	// they are opened one by one at start-up (3 s).
	DefaultMaxTensors = 1 << 16
	// allMetadata is the maximum length of the metadata of all tensors of a folder, which
	// stays in memory.
	allMetadata = 64 << 20
	// manifestBytes is the maximum length of a set's manifest: each file takes 110 bytes.
	manifestBytes = store.MaxSet * 128
	// sealers is how many files of a set are synced concurrently.
	sealers = 8
	// writeBack is how many bytes of a growing file are sent to the disk at a time, so that
	// Commit has little to wait for.
	writeBack = 8 << 20
	// maxViews is the maximum number of views in one pwritev: Linux's IOV_MAX.
	maxViews = 1024
	// nameLocks is how many names can be committed, opened or deleted concurrently, if their
	// hashes differ.
	nameLocks = 64
)
