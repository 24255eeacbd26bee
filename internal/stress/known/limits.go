package known

const (
	mib = 1 << 20
	// baseBytes is the memory that every tensor is a window of, and LargestBytes the
	// most of it that one tensor has.
	baseBytes    = 48 * mib
	LargestBytes = 32 * mib
)
