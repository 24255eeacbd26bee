package verbs

import (
	"context"
	"math"

	"github.com/spf13/cobra"
	"golang.org/x/time/rate"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/moving"
	"github.com/tensorferry/tensorferry/internal/cli/settings"
)

func verifyCommand() *cobra.Command {
	var bytesPerSecond int
	c := asking(&cobra.Command{
		Use:   "verify [NAME...]",
		Short: "check the tensors of a server against their digests",
		Long: `Verify pulls the tensors in a server's store, at most --rate bytes a second, and checks
them against the digests that the server has kept since they were pushed. It prints the
names of those that are damaged, and then fails; the server counts and logs them, too.
NAME may be a glob, as for pull; without one, all tensors are checked.

A tensor of a file in the server's folder has no digest until it is first pulled, by
verify or by anybody.`,
		Example: `  tensorferry verify
  tensorferry verify 'model/**' --rate 20MiB`,
		Args: cobra.ArbitraryArgs,
	}, func(ctx context.Context, cl *client.Client, names []string, out display.Printer) error {
		return moving.Verify(ctx, cl, names, rate.NewLimiter(rate.Limit(bytesPerSecond), bytesPerSecond), out)
	})
	settings.Size(c.Flags(), &bytesPerSecond, "rate", 100<<20, 1<<10, math.MaxInt32, "most `bytes` to read in a second")
	return c
}
