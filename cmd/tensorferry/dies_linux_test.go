package main

import (
	"os/exec"
	"syscall"
)

// diesWithTest has the system kill a program when the tests end, however that is.
func diesWithTest(c *exec.Cmd) { c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }
