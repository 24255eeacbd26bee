package verbs

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/moving"
)

func rmCommand() *cobra.Command {
	var yes bool
	c := asking(&cobra.Command{
		Use:   "rm NAME...",
		Short: "remove tensors from a server",
		Long: `Rm removes tensors from a server's store and prints their names. NAME may be a glob,
as for pull. If a NAME matches nothing, rm fails and removes nothing. A tensor of a
file in the server's folder cannot be removed; delete the file on the server.`,
		Example: `  tensorferry rm x
  tensorferry rm 'experiments/7/*'`,
		Args: Takes(many, "NAME"),
	}, func(ctx context.Context, cl *client.Client, names []string, out display.Printer) error {
		return moving.Remove(ctx, cl, names, yes, out)
	})
	c.Flags().BoolVar(&yes, "yes", false, "remove more than 100 tensors")
	return c
}
