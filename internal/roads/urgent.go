//go:build linux

package roads

import (
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// Hurry schedules every thread of this process, also those to come, before everything that is
// not urgent, for programs that do little but carry packets: Go hands a thread that has waited
// on by others. What Command starts runs as usual, other children do not. The system may
// refuse it to all but root.
func Hurry() error { return schedule(unix.SchedAttr{Policy: unix.SCHED_RR, Priority: 1}) }

// schedule schedules every thread of this process.
func schedule(how unix.SchedAttr) error {
	how.Size = unix.SizeofSchedAttr
	for range 2 { // for threads that are started meanwhile
		tasks, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return err
		}
		for _, task := range tasks {
			tid, _ := strconv.Atoi(task.Name())
			if err := unix.SchedSetAttr(tid, &how, 0); err != nil && err != unix.ESRCH {
				return err
			}
		}
	}
	return nil
}
