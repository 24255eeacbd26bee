package attack

import "time"

const (
	kib = 1 << 10
	mib = 1 << 20
	gib = 1 << 30

	// frameBytes is what an HTTP/2 frame may carry if nobody has agreed on more.
	frameBytes = 16 * kib
	// deafBytes is the socket's buffer of a connection that nobody reads.
	deafBytes = 4 * kib
	// againAfter is when a connection that has ended is opened again.
	againAfter = 50 * time.Millisecond
)
