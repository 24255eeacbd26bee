package tensorfile

// Limits of what a file may ask for before its content has been checked.
const (
	// MaxSafetensorsHeader is the longest .safetensors header in bytes: the
	// bound of the reference implementation, room for some 500 000 tensors.
	MaxSafetensorsHeader = 100_000_000
	// MaxNPYHeader is the longest .npy header in bytes: all that version 1.0 can
	// say. A header of 32 axes of 13 digits takes less than 1 KiB.
	MaxNPYHeader = 1<<16 - 1
)
