package stack

const (
	// maxWidth bounds a layer's width: a tile of 64 rows of that width is 64 MiB.
	maxWidth = 1 << 18
	// maxLayers bounds a stack model: ten times the layers of the deepest networks there are.
	maxLayers = 4096
	// maxResiduals bounds how deep residuals may nest; each costs a tile per worker.
	maxResiduals = 16
	// maxSpecBytes bounds model.json: 4096 layers of 256 bytes.
	maxSpecBytes = 1 << 20
)
