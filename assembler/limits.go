package assembler

const (
	// MaxCorrupt is how often one chunk may arrive with a wrong checksum before its tensor
	// is given up: a flaw in transit is rare and passes, one in memory stays.
	MaxCorrupt = 3
	// ChunkOverhead is the bytes kept per chunk below the limit (state and
	// checksum), for whoever accounts for it.
	ChunkOverhead = 5
)
