package store

import "time"

const (
	mib = 1 << 20
	// MaxName is the longest name in bytes, that of the wire.
	MaxName = 512
	// DefaultMaxTensors is how many tensors a folder takes by default: a file each, which
	// start-up opens one by one (3 s).
	DefaultMaxTensors = 1 << 16
	// pageNames is how many names List takes under one lock (less than 1 ms) and matches
	// in one turn (10 ms for the worst glob), and how many tensors Each lists at a time.
	pageNames = 1024
	// writeBack is how many bytes of a growing file go to the disk at a time, so that
	// Commit waits for little.
	writeBack = 8 * mib
	// maxViews is how many views one pwritev takes: Linux's IOV_MAX.
	maxViews = 1024
	// nameLocks is how many names of a folder can be committed, opened or deleted at a
	// time, if their hashes differ.
	nameLocks = 64
	// clockGrain is how far apart two changes of a folder must be for its time to differ
	// on any file system (FAT: 2 s).
	clockGrain = 2 * time.Second
	// quoted is how many characters of a peer's value an error quotes: all of a good one.
	quoted = 64
	// generatorCache is how many bytes a Generator keeps for its next views: a few chunks
	// of a few pulls.
	generatorCache = 16 * mib
	// viewBytes is how many bytes of released views a Folder keeps for the next: some
	// pulls, with two chunks each.
	viewBytes = 32 * mib
)
