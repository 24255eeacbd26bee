package verbs

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/looking"
)

func infoCommand() *cobra.Command {
	var failed bool
	var call string
	c := asking(&cobra.Command{
		Use:   "info",
		Short: "show limits and counters of a server, or why calls failed",
		Long: `Info shows the limits and counters of a server and the state of its models.

With --failures, it shows why the last calls failed whose callers were not told, the
newest first. A server that identifies its clients shows each its own. Another one
shows them on its own machine only, but anybody can ask for one --call.`,
		Example: `  tensorferry info
  tensorferry info --failures
  tensorferry info --call 0199a3a87c517cc28a3f5c0d9f1b2e4d`,
		Args: Takes(0),
	}, func(ctx context.Context, cl *client.Client, args []string, out display.Printer) error {
		if failed || call != "" {
			return looking.Failures(ctx, cl, call, out)
		}
		return looking.Info(ctx, cl, args, out)
	})
	c.Flags().BoolVar(&failed, "failures", false, "show why calls failed")
	c.Flags().StringVar(&call, "call", "", "show why the call with this `id` failed")
	return c
}
