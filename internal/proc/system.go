package proc

import (
	"fmt"
	"math"

	"github.com/prometheus/procfs"
)

// Resident is the memory of a process that is present, in bytes.
type Resident struct {
	Own    int64 // nobody else's
	Mapped int64 // pages of files, which the system may take back, and programs share
	Peak   int64 // the most that both together have been
}

// ResidentOf returns that of a living process. It fails where the system does not tell.
func ResidentOf(pid int) (Resident, error) {
	p, err := procfs.NewProc(pid)
	if err != nil {
		return Resident{}, fmt.Errorf("memory is read from /proc, as Linux has it: %w", err)
	}
	s, err := p.NewStatus()
	return Resident{int64(s.RssAnon + s.RssShmem), int64(s.RssFile), int64(s.VmHWM)}, err
}

// MostDescriptors returns how many this process may have. Go has raised its limit to the hard one.
func MostDescriptors() int {
	if p, err := procfs.Self(); err == nil {
		if l, err := p.Limits(); err == nil && l.OpenFiles < math.MaxInt {
			return int(l.OpenFiles)
		}
	}
	return math.MaxInt
}
