package storing

import "time"

const (
	// PushTensors is how many tensors may be open on one push at a time: each needs state.
	PushTensors = 16
	// Tensors is the total number of tensors that a push, or the request of a pull, may
	// name: each needs state, and the response must fit into a message.
	Tensors = 1024
	// commits is how many tensors of a push are made durable concurrently: a disk completes
	// several fsyncs as fast as one.
	commits = 4
	// recordsKept and recordTensorsKept limit what is remembered of ended transfers: up to
	// 16 MB, with 900 bytes per tensor, mostly its name and the beginning of its message, of
	// which recordMessage bytes are kept. Of one transfer, the last Tensors are.
	recordsKept       = 1024
	recordTensorsKept = 8 << 10
	recordMessage     = 256
	// pushedBytes is what a push keeps per tensor until its answer, and a set until it is
	// stored, in addition to the name.
	pushedBytes = 1 << 10
	// pickedBytes is the same for a tensor that a get picks. The first pinned of them are
	// opened at once and not charged: beyond, one that is replaced meanwhile fails.
	pickedBytes = 512
	pinned      = 128
	// pickTime is how long a get goes on to open again what sets have replaced since it opened
	// it: as many tensors as a folder has by default take a few seconds.
	pickTime = 10 * time.Second
	// damagesListed is how many damaged tensors of a get are among the failures that a server
	// remembers: a client may say so of each, and others have failures, too.
	damagesListed = 16
	// feedTensors is how many tensors of a get may be on their way, and feedPieces how many
	// views of one: enough for a round trip of a few milliseconds.
	feedTensors = 32
	feedPieces  = 16
	feedBytes   = 16 << 20 // of tensors on their way, unless one alone is larger or the peer is far
)
