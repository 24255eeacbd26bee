package store

import "time"

const (
	mib = 1 << 20
	// MaxName is the longest name in bytes, that of the wire: it bounds what a
	// list of names takes.
	MaxName = 512
	// DefaultMaxTensors is how many tensors may be pushed into a folder unless its
	// config says otherwise: a file each, which start-up opens one by one (3 s).
	DefaultMaxTensors = 1 << 16
	// pageNames is how many names List looks at under one lock, which takes less than
	// 1 ms, and in one turn of its own while others wait for theirs (10 ms for the
	// worst glob), and how many tensors Each lists at a time.
	pageNames = 1024
	// writeBack is how many bytes of a growing file are given to the disk at a
	// time, so that little is left to wait for at Commit.
	writeBack = 8 * mib
	// maxViews is how many views one pwritev takes: Linux's IOV_MAX.
	maxViews = 1024
	// nameLocks is how many names can be committed, opened or deleted in a folder
	// at a time without waiting for each other, if their hashes differ.
	nameLocks = 64
	// clockGrain is how far apart two changes of a folder have to be for its time
	// to differ, on any file system (FAT: 2 s).
	clockGrain = 2 * time.Second
	// quoted is how many characters an error quotes of a value that somebody else
	// gave: all of a good one.
	quoted = 64
	// generatorCache is how many bytes of memory a Generator keeps for its next
	// views: a few chunks of a few pulls at a time.
	generatorCache = 16 * mib
	// viewBytes is how much memory of views that were released a Folder keeps for the
	// next: some pulls, with two chunks each.
	viewBytes = 32 * mib
)
