package worker

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// detach has a process be killed when the thread that starts it ends, and not hear of an
// interrupt at the terminal: the host decides.
func detach(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// await returns when a child has ended. It is still there to be waited for.
func await(pid int) {
	for errors.Is(unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil), unix.EINTR) {
	}
}

// kill kills a child that has not been waited for, and what it has started.
func kill(pid int) {
	_ = unix.Kill(-pid, unix.SIGKILL) // it may be over already
	_ = unix.Kill(pid, unix.SIGKILL)
}

// residentOf returns the memory of a process that is present, 0 where nobody says.
func residentOf(pid int) int64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	fields := strings.Fields(string(text))
	if err != nil || len(fields) < 2 {
		return 0
	}
	pages, _ := strconv.ParseInt(fields[1], 10, 64)
	return pages * int64(os.Getpagesize())
}
