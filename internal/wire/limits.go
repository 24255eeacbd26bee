package wire

// Limits of one frame. They bound what a peer can make this side allocate
// before anything has been understood; what a model's name or a tensor's
// metadata may hold is checked above, where one call can fail alone.
const (
	// MaxControlBytes is every byte of a frame but its chunk's payload. It is
	// room for one call and one desc with as many parameters and as much
	// metadata as they may have, and it is what the largest chunk is given on
	// top in gRPC's receive limit.
	MaxControlBytes = 64 << 10
	// MaxCalls is the calls in one frame: a session has no more open tensors.
	MaxCalls = 64
	// MaxParts is the parts of each other repeated kind in one frame. Parts are
	// at least two bytes on the wire and a hundred in memory, so that the bytes
	// alone would not bound them well.
	MaxParts = 256
	// MaxBindings is the inputs of one call, or the outputs of one done: again,
	// a session has no more open tensors.
	MaxBindings = 64
)

const (
	// smallView is the longest view that is copied beside the header. gRPC
	// ignores the pool of buffers up to this capacity, so their release would
	// never be heard of; copying 1 KiB is cheaper than a buffer of its own anyway.
	smallView = 1 << 10
	// headBytes is the first capacity of a header buffer: a chunk's header and a
	// few control parts. It must pass smallView, or gRPC would not track it.
	headBytes = 4 << 10
	// maxColdBytes is the largest scratch kept for the next frame that is received:
	// an idle session keeps it.
	maxColdBytes = 2 << 10
	// maxPooledHead is the largest header buffer kept for the next frame.
	maxPooledHead = MaxControlBytes + headBytes
	// frameBytes is the largest HTTP/2 data frame that grpc-go sends.
	frameBytes = 16 << 10
)
