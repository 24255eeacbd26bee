//go:build !unix

package proc

import "time"

// CPUTime is not known here: CPU times are 0, and left out of the reports.
func CPUTime() time.Duration { return 0 }
