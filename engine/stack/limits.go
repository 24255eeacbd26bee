package stack

const (
	// maxWidth bounds a layer's width: a tile of 64 rows of that width is 64 MiB.
	maxWidth = 1 << 18
	// maxResiduals bounds how deep residuals may nest; each costs a tile per worker.
	maxResiduals = 16
	// maxPositions bounds an item: attention over 8192 positions of width 1024 takes a core about 15 s
	// per layer, and x between two layers takes 128 times the memory of a tile.
	maxPositions = 1 << 13
	// maxSpecBytes bounds model.json: 4096 layers of 256 bytes.
	maxSpecBytes = 1 << 20
)
