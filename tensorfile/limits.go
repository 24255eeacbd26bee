package tensorfile

// Limits of what a file may ask for before its content has been checked.
const (
	// MaxSafetensorsHeader is the longest .safetensors header, or index, in bytes: the
	// bound of the reference implementation, room for long names and metadata.
	MaxSafetensorsHeader = 100_000_000
	// MaxEntries is how many tensors a .safetensors header or an index may have, and how
	// many texts its metadata: some 250 bytes of memory each. The largest models known have
	// 200 000 tensors, in some 60 files.
	MaxEntries = 1 << 18
	// MaxFortranStream is the most bytes of an array in Fortran order that does not lie in
	// a file of its own, which is held in memory: its first row is complete only with
	// its last bytes.
	MaxFortranStream = 1 << 30

	// readAhead is how many bytes are converted at a time.
	readAhead = 64 << 10
)
