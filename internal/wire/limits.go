package wire

import "github.com/tensorferry/tensorferry/frame"

// Limits of one frame. They bound what a peer can make this side allocate before
// the frame is understood; the sizes of names and metadata are checked above, where
// one call can fail alone.
const (
	// MaxControlBytes is every byte of a frame but its chunk's payload: room for one
	// call and one desc with the most parameters and metadata. gRPC's receive limit is
	// the largest chunk and this.
	MaxControlBytes = 64 << 10
	// MaxCalls is the calls in one frame, the inputs of one call, and the outputs of one done: a
	// session has no more open tensors.
	MaxCalls = 64
	// MaxParts is the parts of each other repeated kind in one frame: two bytes on the
	// wire become a hundred in memory.
	MaxParts = 256
	// packedPart is how many bytes of packed varints count as one part: they become up to 128.
	packedPart = 16
)

// FrameBytes is the largest data frame that gRPC sends, and takes. Those of more than SmallBytes,
// up to which it puts no buffers back, lie in buffers of MediumBytes or FrameBytes, so that no
// larger frame takes more than four times its bytes. MediumBytes are also for what a frame has beside
// its chunk's payload, as a rule.
const (
	FrameBytes  = 16 << 10
	MediumBytes = 4 << 10
	SmallBytes  = 1 << 10
)

const (
	// maxColdBytes is the largest scratch that an idle session keeps.
	maxColdBytes = 2 << 10
	// segmentBytes of buffers are mapped at a time, or leastBuffers, so that the system can
	// use huge pages for chunks: uploads without a lane run 4 % faster (November 2026).
	segmentBytes = 1 << 20
	leastBuffers = 4
)

// classes are the sizes of buffers, those of data frames that are received and of chunks that
// are sent, and how many of each that nobody uses keep their memory, 15 MiB together: of data
// frames, what four connections have on their way; of chunks of 1 MiB, what two streams have.
var classes = [...]struct{ size, kept int }{
	{MediumBytes, 256},
	{FrameBytes, 512},
	{MediumBytes + 64<<10, 16},
	{MediumBytes + 256<<10, 4},
	{MediumBytes + 1<<20, 4},
	{MaxControlBytes + frame.ChunkBytesCeiling, 0},
}
