package cpu

import "time"

const (
	// defaultMemory is a host's budget when nobody says: enough for sixty runs
	// at full depth. A server sets its own share of the process' memory.
	defaultMemory = 1 << 30

	// blockTime is how long a block may be computed before it is overlong: a thousand times
	// what one of the usual size takes.
	blockTime = time.Second
	// sparesPerWorker is how many permits of overlong blocks are replaced at a time, for each
	// worker: with all of them a core has two blocks to compute.
	sparesPerWorker = 1

	// tileRows is the height of the tiles that a stack model works through. With
	// panelWidth columns it stays below four of gonum's 64 × 64 blocks, from
	// where gonum would start goroutines of its own.
	tileRows = 64
	// panelWidth is how many columns of a weight are multiplied at a time.
	panelWidth = 192
	// panelDepth is how many rows of a panel are: 48 KiB of weights, which stay in the
	// first-level cache while a tile's rows pass.
	panelDepth = 64
)
