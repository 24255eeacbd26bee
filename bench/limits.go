package main

const (
	// tensorBytes is the tensor that the required figures are for.
	tensorBytes = 256 << 20
	// quickBytes is enough for two batches of the largest size.
	quickBytes = 32 << 20
	// maxMessageBytes is what Flight's ends may receive in a message. gRPC allows
	// 4 MiB; the largest batch and what describes it need a little more than 16.
	maxMessageBytes = 32 << 20
	// sweepRounds are run for each of Flight's batch sizes to find its best: the
	// choice needs less than the figure does.
	sweepRounds = 5
)

// batchSizes are the bytes of tensor that a record batch of Flight may carry. It
// is measured with the best of them. 1 MiB is the chunk of everyone else. Smaller ones
// cost a message each, which matters in C++ most; larger ones leave the caches between
// two of the copies.
var batchSizes = []int{256 << 10, 1 << 20, 4 << 20, 16 << 20}
