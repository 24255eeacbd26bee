package store

import "time"

const (
	mib = 1 << 20
	// MaxName is the maximum length of a name in bytes, as on the wire.
	MaxName = 512
	// MaxMetadata is the maximum length of a tensor's metadata in bytes, keys and values
	// together: less than a small tensor with its page.
	MaxMetadata = 32 << 10
	// folderMetadata is the maximum length of the metadata of all tensors of a folder, which
	// stays in memory.
	folderMetadata = 64 * mib
	// DefaultMaxTensors is the default limit of tensors in a folder: each has a file, and
	// they are opened one by one at start-up (3 s).
	DefaultMaxTensors = 1 << 16
	// fileTensors is the maximum number of tensors in all model files of a folder and those
	// below: each takes some 500 bytes of memory. The largest models known have 200 000.
	fileTensors = 1 << 19
	// MaxSet is the maximum number of tensors in a set: all that a folder holds by default.
	MaxSet = 1 << 16
	// keptNames is of how many tensors of the last sets the names are remembered, for those
	// that open several tensors meanwhile: two of the largest sets, 6 MB with usual names.
	keptNames = 2 * MaxSet
	// manifestBytes is the maximum length of a set's manifest: each file takes 110 bytes.
	manifestBytes = MaxSet * 128
	// sealers is how many files of a set are synced concurrently.
	sealers = 8
	// pageNames is how many names List reads under one lock (some µs) and matches in
	// one turn (10 ms for the worst glob), and how many tensors Each lists at a time.
	pageNames = 1024
	// writeBack is how many bytes of a growing file are sent to the disk at a time, so that
	// Commit has little to wait for.
	writeBack = 8 * mib
	// maxViews is the maximum number of views in one pwritev: Linux's IOV_MAX.
	maxViews = 1024
	// nameLocks is how many names of a folder can be committed, opened or deleted
	// concurrently, if their hashes differ.
	nameLocks = 64
	// clockGrain is how far apart two changes of a folder must be to have different times
	// on every file system (FAT: 2 s).
	clockGrain = 2 * time.Second
	// quoted is how many characters of a peer's value an error quotes: all of a valid one.
	quoted = 64
	// generatorCache is how many bytes a Generator keeps for its next views: a few chunks
	// of a few pulls.
	generatorCache = 16 * mib
	// generatedBytes of a view are made at a time, in less than a millisecond: a view of no more
	// takes no turn.
	generatedBytes = 64 << 10
	// viewBytes is how many bytes of released views a Folder keeps for reuse: two chunks
	// each of several pulls.
	viewBytes = 32 * mib
)
