package splitlearn

import "time"

const (
	messageBytes = 104_857_600 // largest message, both ways: their clients take no larger one
	// tensorBytes is what the inputs of a run may have, and its outputs: as much as a message of
	// float16 has when it is widened.
	tensorBytes  = 2 * messageBytes
	firstMessage = 5 * time.Minute // for a request to arrive: 100 MiB at 350 KB/s
	inflateMost  = 1032            // bytes that one of a zlib stream becomes: 258 for two bits
	// probeBytes of a stream are inflated before there is memory for all: elements that look
	// like the beginning of a stream do not get as far.
	probeBytes = 4 << 10
	// passes are kept for ComputeBackward at a time, for passAge, as theirs are.
	passes  = 100
	passAge = 60 * time.Second
	// leaseIdle is how long a lease without passes outlasts its last use: taking it again is two
	// calls. Giving it up may take leaseWait.
	leaseIdle   = time.Second
	leaseWait   = 10 * time.Second
	sampleEvery = 50 * time.Millisecond // between two looks at the system: half a stream's least interval
)
