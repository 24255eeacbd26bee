package tensorfile

// Limits of what a file may ask for before its content has been checked.
const (
	// MaxSafetensorsHeader is the longest .safetensors header in bytes: the
	// bound of the reference implementation, room for some 500 000 tensors.
	MaxSafetensorsHeader = 100_000_000
	// MaxIndex is the longest index of a model of several files in bytes: as many names as
	// a header has.
	MaxIndex = MaxSafetensorsHeader
	// foreignType is how many bytes of an unknown data type's name are kept; the format's
	// own have up to 7.
	foreignType = 40
	// MaxNPYHeader is the longest .npy header in bytes: all that version 1.0 can
	// say. A header of 32 axes of 13 digits takes less than 1 KiB.
	MaxNPYHeader = 1<<16 - 1
)
