package main

import (
	"context"
	"os/exec"

	"github.com/tensorferry/tensorferry/internal/proc"
)

// childServer is a server in a process of its own, which ends with this process.
type childServer struct {
	cmd     *proc.Child
	address string
}

// startServer starts the serve of a tensorferry binary with a free port of the
// loopback interface and waits until it listens. The caller stops it.
func startServer(ctx context.Context, exe string, args ...string) (*childServer, error) {
	args = append([]string{"serve", "--child", "--listen", "127.0.0.1:0"}, args...)
	c, address, err := proc.Serve(ctx, exec.CommandContext(ctx, exe, args...))
	return &childServer{c, address}, err
}

// stop ends the server; how it ended matters no more.
func (c *childServer) stop() { _ = c.cmd.Stop() }
