package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"time"
)

// childWait is how long a server that was told to stop may take, its own
// drainWait included.
const childWait = drainWait + 5*time.Second

// childServer is a server in a process of its own. It ends when its standard
// input does, so that it cannot outlive this process, however that ends.
type childServer struct {
	cmd     *exec.Cmd
	stdin   io.Closer
	address string
}

// startServer starts the serve of a tensorferry binary with a free port of the
// loopback interface and waits until it listens. The caller stops it.
func startServer(ctx context.Context, exe string, args ...string) (*childServer, error) {
	c := &childServer{cmd: exec.Command(exe, append([]string{"serve", "--child", "--listen", "127.0.0.1:0"}, args...)...)}
	var talk strings.Builder
	c.cmd.Stderr = &talk
	c.cmd.WaitDelay = time.Second
	var err error
	if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	unhook := context.AfterFunc(ctx, func() { _ = c.stdin.Close() }) // it then ends, and with it its output
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if !unhook() {
		c.stop()
		return nil, context.Cause(ctx)
	}
	if err != nil {
		c.stop()
		return nil, fmt.Errorf("the server did not start: %s", strings.TrimSpace(talk.String()))
	}
	c.address = strings.TrimSpace(line)
	return c, nil
}

// stop ends the server and waits until it is gone.
func (c *childServer) stop() {
	_ = c.stdin.Close() // closed twice when ctx ended while it started
	late := time.AfterFunc(childWait, func() { _ = c.cmd.Process.Kill() })
	defer late.Stop()
	_ = c.cmd.Wait() // how it ended matters no more
}
