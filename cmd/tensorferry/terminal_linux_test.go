package main

import (
	"fmt"
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/internal/testkit"
)

func TestAServerWhoseTerminalIsClosedDrains(t *testing.T) {
	testkit.Start(t)
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	require.NoError(t, err)
	defer master.Close() // it may be closed
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	require.NoError(t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	require.NoError(t, err)
	o := &operated{t: t, cmd: program(t, "tensorferry", "serve", "--listen", "127.0.0.1:0", "--metrics", "off")}
	o.cmd.Stdin, o.cmd.Stderr = slave, o
	o.cmd.SysProcAttr.Setctty = true // of stdin
	require.NoError(t, o.cmd.Start())
	require.NoError(t, slave.Close())
	o.says("msg=listening")
	require.NoError(t, master.Close())
	require.Zero(t, o.ends(), o.said())
	require.Contains(t, o.said(), "msg=stopped drained=true")
}
