package worker

import (
	"errors"
	"os/exec"
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
