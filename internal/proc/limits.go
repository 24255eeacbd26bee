package proc

import "time"

const (
	// StartWait is how long a server may take until it listens.
	StartWait = 30 * time.Second
	// StopWait is how long a child that was told to stop may take before it is
	// killed: a server's own --drain, and as much again.
	StopWait = 20 * time.Second
	// logLines is how many lines of a child's log are kept.
	logLines = 20
	// lineBytes is the longest line that is kept whole.
	lineBytes = 4 << 10
)
