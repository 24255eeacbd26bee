package files

import "time"

const (
	// maxTensors is the maximum number of tensors in all model files of a folder and those
	// below: each takes some 500 bytes of memory. The largest models known have 200 000.
	maxTensors = 1 << 19
	// clockGrain is how far apart two changes of a folder must be to have different times
	// on every file system (FAT: 2 s).
	clockGrain = 2 * time.Second
)
