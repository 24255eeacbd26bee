package main

import (
	"os/exec"
	"syscall"
)

// diesWithTest has the system kill a program when the tests end, however that is, and gives it
// no terminal, which would be that of whoever runs the tests.
func diesWithTest(c *exec.Cmd) {
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setsid: true}
}
