package serve

import (
	"context"
	"os/exec"

	"github.com/tensorferry/tensorferry/internal/proc"
)

// Start runs serve from the tensorferry binary exe on a free loopback port and waits
// until it listens. It ends with this process at the latest; the caller stops it.
func Start(ctx context.Context, exe string, args ...string) (c *proc.Child, address string, err error) {
	args = append([]string{"serve", "--child", "--listen", "127.0.0.1:0"}, args...)
	return proc.Serve(ctx, exec.CommandContext(ctx, exe, args...))
}
