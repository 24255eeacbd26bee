package store

const (
	mib = 1 << 20
	// MaxName is the longest name in bytes, that of the wire: it bounds what a
	// list of names takes.
	MaxName = 512
)
