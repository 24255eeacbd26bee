//go:build !linux

package worker

import "os/exec"

// Links, and so workers, are Linux's.

func detach(*exec.Cmd) {}

func await(int) {}

func kill(int) {}
