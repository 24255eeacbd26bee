package calling

import "time"

const (
	// smallChunks times session.Slabs are how many chunks of a streamed input are read ahead, of
	// chunks that are as many times smaller than 1 MiB: the chunks of a call that makes small
	// rows would leave a far line empty.
	smallChunks = 128
	// pushPieces is how many pieces, of 1 MiB or a chunk, of a tensor of a push may be on their
	// way, and how many MiB of all of them, unless one alone is larger or the server is far.
	pushPieces = 16
	// pullTensors limits the tensors of a pull with a glob, each of which takes a few
	// hundred bytes and its name: a server's folder holds as many by default.
	pullTensors = 1 << 16
	// pullTextBytes limits the texts kept from a pull's summaries, of which there may be
	// pullTensors of 4 KiB each. Texts beyond it are truncated.
	pullTextBytes = 1 << 20
	// silentRate is the rate, in bytes per second, that a server is expected to reach where
	// the protocol keeps it silent: while it reads held ranges for the digest, and while it
	// syncs what was pushed. A slow disk reaches it.
	silentRate = 32 << 20
	// signs is how many times per idle timeout of the server the client reports that it
	// waits for its own input or output. The interval is at most mostSign, which also
	// applies if the timeout is unknown, and at least leastSign, whatever the server says.
	signs     = 3
	mostSign  = 10 * time.Second
	leastSign = 10 * time.Millisecond
	// ListBytes limits what a list of tensors says, and the metadata of a get's tensors.
	ListBytes = 256 << 20
)
