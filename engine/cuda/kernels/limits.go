package kernels

const (
	// threads are those of a block: enough to hide the latency of memory with a few
	// blocks per multiprocessor, and linear_f32 is written for this number.
	threads = 256
	// maxBlocks are those of an elementwise kernel: the largest GPUs have about 150
	// multiprocessors, of which each runs 8 such blocks at once; with three times as
	// many, the last to finish waits for little. Beyond, threads take several elements.
	maxBlocks = 4096
	// tile is how many rows and how many outputs a block of linear_f32 computes, and of
	// how many queries one of attention_f32.
	tile = 64
	// narrowRow is the widest row that narrowTeam threads share, a warp; all of a block share
	// a wider one. So has kernels.cu.
	narrowRow, narrowTeam = 4096, 32
	// maxTiles is what CUDA allows a grid in y. Beyond, blocks take several tiles. It bounds the
	// blocks of attention_f32 too, of which a multiprocessor runs three or so at once: about a
	// hundred rounds.
	maxTiles = 65535
)
