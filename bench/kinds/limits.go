package kinds

const (
	// atOnce is how many calls are on their way in a sample of AtOnce.
	atOnce = 64
	// uploadsBeside is the maximum number of uploads in a sample of CallBeside.
	uploadsBeside = 5
	// copyBytes is the size of each read and write when a file is copied, as cp's is.
	copyBytes = 256 << 10
	// pushTensors is how many tensors a push or a deletion has: versions without sets take
	// 1024.
	pushTensors = 1000
	// hostTensors: the server of a measure may hold so many large tensors.
	hostTensors = 4
	// hostSpare is its memory beyond them, for blocks.
	hostSpare = 64 << 20
)
