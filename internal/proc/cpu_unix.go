//go:build unix

package proc

import (
	"syscall"
	"time"
)

// CPUTime returns the time that all threads of this process have run, in the
// program and in the kernel.
func CPUTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0 // it fails for bad arguments only
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
