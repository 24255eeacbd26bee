package wire

// Limits of one frame. They bound what a peer can make this side allocate before
// the frame is understood; the sizes of names and metadata are checked above, where
// one call can fail alone.
const (
	// MaxControlBytes is every byte of a frame but its chunk's payload: room for one
	// call and one desc with the most parameters and metadata. gRPC's receive limit is
	// the largest chunk and this.
	MaxControlBytes = 64 << 10
	// MaxCalls is the calls in one frame: a session has no more open tensors.
	MaxCalls = 64
	// MaxParts is the parts of each other repeated kind in one frame: two bytes on the
	// wire become a hundred in memory.
	MaxParts = 256
	// MaxBindings is the inputs of one call, or the outputs of one done, as MaxCalls.
	MaxBindings = 64
)

const (
	// smallView is the longest view that is copied behind the header: gRPC never puts
	// back buffers of up to this capacity, and a copy of 1 KiB is cheaper anyway.
	smallView = 1 << 10
	// headBytes is the first capacity of a header buffer: a chunk's header and a
	// few control parts. It must exceed smallView, or gRPC would not put it back; no more,
	// because a peer may leave thousands unread.
	headBytes = smallView + 128
	// maxColdBytes is the largest scratch that an idle session keeps.
	maxColdBytes = 2 << 10
	// maxPooledHead is the largest header buffer kept for the next frame.
	maxPooledHead = MaxControlBytes + headBytes
	// keptBytes of receive buffers that nobody uses keep their memory, and a quarter of the
	// smaller ones: what seven connections have on their way.
	keptBytes = 12 << 20
	// segmentBytes of buffers are mapped at a time.
	segmentBytes = 1 << 20
)
