package cpu

import "time"

const (
	// maxDelay bounds what a caller may ask the slow model to sleep per block:
	// longer than any test waits, shorter than what looks like a hang.
	maxDelay = time.Minute

	// tileRows is the height of the tiles that a stack model works through. With
	// panelWidth columns it stays below four of gonum's 64 × 64 blocks, from
	// where gonum would start goroutines of its own.
	tileRows = 64
	// panelWidth is how many columns of a weight are multiplied at a time.
	panelWidth = 192
	// panelDepth is how many rows of a panel are: 48 KiB of weights, which stay in the
	// first-level cache while a tile's rows pass.
	panelDepth = 64

	// maxWidth bounds a layer's width: a tile of that width is 64 MiB.
	maxWidth = 1 << 18
	// maxLayers bounds a stack model: ten times the layers of the deepest
	// networks there are.
	maxLayers = 4096
	// maxResiduals bounds how deep residuals may nest; each costs a tile per worker.
	maxResiduals = 16
	// maxSpecBytes bounds model.json: 4096 layers of 256 bytes.
	maxSpecBytes = 1 << 20
)
