package tensor

// Limits of every tensor, whoever made it. They bound what arithmetic has to
// survive; budgets (bytes in memory) live where memory is taken.
const (
	// MaxRank is the number of axes; NumPy's own limit until 2.0 was 32 too.
	MaxRank = 32
	// MaxDim is one dimension in elements: with 16-byte elements still far
	// below 2^63 bytes, so that a single axis never overflows by itself.
	MaxDim = 1 << 40
	// MaxChunks is the number of chunks of one tensor: what a receiver keeps
	// per chunk (5 bytes) then stays below 6 MiB for the largest tensor.
	MaxChunks = 1 << 20
)
