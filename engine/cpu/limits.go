package cpu

import "time"

const (
	// maxDelay bounds what a caller may ask the slow model to sleep per block:
	// longer than any test waits, shorter than what looks like a hang.
	maxDelay = time.Minute
)
