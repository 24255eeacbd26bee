//go:build !unix

package bench

import "time"

// cpuTime is not known here: CPU times are 0, and left out of the reports.
func cpuTime() time.Duration { return 0 }
