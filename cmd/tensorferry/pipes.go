package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/client"
)

// pipes are the flags of a command that reads stdin or writes stdout for a server, either
// of which may rest.
type pipes struct{ idle time.Duration }

func (p *pipes) flags(c *cobra.Command) {
	durationVar(c.Flags(), &p.idle, "input-idle", 0, 0, "how long input and output may be idle; 0 is the server's limit")
}

// config returns that of a client whose Reader or Writer may rest, and a context that ends
// when it has rested for too long.
func (p *pipes) config(ctx context.Context) (client.Config, context.Context, context.CancelCauseFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	return client.Config{InputIdle: p.idle, Idled: cancel}, ctx, cancel
}

// open is openInput, which may wait for a header.
func (p *pipes) open(ctx context.Context, file string, raw rawInput, stdin io.Reader) (*opened, error) {
	if p.idle > 0 {
		title := file
		if file == "-" {
			title = "stdin"
		}
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, p.idle, fmt.Errorf("%w: %s, for %v, the most that InputIdle allows", client.ErrInputIdle, title, p.idle))
		defer cancel()
	}
	return openInput(ctx, file, raw, stdin)
}
