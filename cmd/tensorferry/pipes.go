package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/client"
)

// pipes has the flag of a command whose input or output may be an idle pipe.
type pipes struct{ idle time.Duration }

func (p *pipes) flags(c *cobra.Command) {
	durationVar(c.Flags(), &p.idle, "input-idle", 0, 0, "how long input and output may be idle; 0 is the server's limit")
}

// config returns a client's config and a context that ends when a Reader or Writer of the
// client has been idle for too long.
func (p *pipes) config(ctx context.Context) (client.Config, context.Context, context.CancelCauseFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	return client.Config{InputIdle: p.idle, Idled: cancel}, ctx, cancel
}

// open is openInput with a limit on the time that it waits for a header.
func (p *pipes) open(ctx context.Context, file string, raw rawInput, stdin io.Reader) (*opened, error) {
	if p.idle > 0 {
		title := file
		if file == "-" {
			title = "stdin"
		}
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, p.idle, fmt.Errorf("%w: nothing from or for %s in %v", client.ErrInputIdle, title, p.idle))
		defer cancel()
	}
	return openInput(ctx, file, raw, stdin)
}
