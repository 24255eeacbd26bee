package kinds

const (
	// smallPiece is what a raw socket checks while it is in the cache of a core.
	smallPiece = 256 << 10
	// uploadsBeside bounds how many uploads small calls are made beside in a sample.
	uploadsBeside = 5
	// copyBytes is what a file is copied in pieces of: cp's, or two of an older one's.
	copyBytes = 256 << 10
	// hostTensors: the server of a measure may hold so many large tensors.
	hostTensors = 4
	// hostSpare is its memory beyond them, for blocks.
	hostSpare = 64 << 20
)
