package known

const (
	mib = 1 << 20
	// baseBytes is the memory that every tensor is a window of.
	baseBytes = 48 * mib
	// LargestBytes is the most of it that one tensor has.
	LargestBytes = 32 * mib
)
