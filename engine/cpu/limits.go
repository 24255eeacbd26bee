package cpu

import "time"

const (
	// defaultMemory is a host's budget when nobody says: enough for sixty runs
	// at full depth. A server sets its own share of the process' memory.
	defaultMemory = 1 << 30

	// keptShare is the part of a host's memory that its models may keep for sequences: one half, so
	// that calls still run while sequences rest.
	keptShare = 2

	// blockTime is how long a block may be computed before it is overlong: a thousand times
	// what one of the usual size takes.
	blockTime = time.Second

	// turnTime is how long a block is computed until it rests: several times
	// what a small call takes, and a hundred times what a change of turns does.
	turnTime = 2 * time.Millisecond
	// longPerWorker is how many blocks may be long, for each worker, of those whose tiles no call
	// is charged for: a tile has 64 rows of a few widths, about a megabyte.
	longPerWorker = 8

	// tileRows is the height of the tiles that a stack model works through, and how many rows
	// of a panel are multiplied at a time: 48 KiB of weights, which stay in the first-level
	// cache while a tile's rows pass. With panelWidth columns a tile stays below four of gonum's 64 × 64 blocks, from
	// where gonum would start goroutines of its own.
	tileRows = 64
	// panelWidth is how many columns of a weight are multiplied at a time.
	panelWidth = 192
)
