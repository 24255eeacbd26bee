package verbs

import (
	"math"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/cli/looking"
	"github.com/tensorferry/tensorferry/internal/cli/settings"
)

func showCommand() *cobra.Command {
	var o looking.ShowOptions
	c := &cobra.Command{
		Use:   "show FILE... | show --server ADDRESS NAME...",
		Short: "show what tensors contain: range, mean, NaN, a histogram",
		Long: `Show prints the data type, shape and size of tensors; the minimum, maximum, mean and
population standard deviation of their finite elements; the number of zero, NaN and
infinite elements; and a histogram with equal bins from minimum to maximum. Complex
numbers count by their magnitude, bool as 0 and 1. Show reads each tensor once and
never holds a whole one in memory.

FILE is .npy, .npz, .pt or .pth, a model, raw bytes with --dtype and --shape, or "-" for
stdin. FILE:name is one tensor of a .npz file or of a model. A model is a .safetensors
file, the .safetensors.index.json of several, a folder with one of these, or a .pt file
of a dict of tensors; show lists its metadata and tensors, and reads the tensors only
with --stats, --head or --slice. Of a .pt file nothing is executed: what holds more than
tensors, such as an optimizer's state, is refused.

With --server, NAME is a tensor in the server's store or a glob, as for pull, or, with
--source, a source.

--head N also prints the first N elements, with the index of the first one on each
line. --slice shows only a part of each tensor, with its first 100 elements unless
--head says otherwise. A slice is written as in NumPy, with positive steps: an index
or start:stop:step for each axis, separated by commas. A negative index counts from
the end, and ... stands for all axes that are not given.`,
		Example: `  tensorferry show x.npy
  tensorferry show weights.safetensors
  tensorferry show weights.safetensors:layer.0.bias --json
  tensorferry show x.npy --head 20
  tensorferry show images.npy --slice 0,:,::2
  tensorferry gen --shape 1000000 | tensorferry show -
  tensorferry show y.bin --dtype float32 --shape 1000,64
  tensorferry show --server 127.0.0.1:50051 'model/*'`,
		Args: Takes(many, "FILE (NAME with --server)"),
		RunE: func(c *cobra.Command, args []string) error {
			o.Headed = c.Flag("head").Changed
			if o.Server == "" && c.Flag("server").Changed {
				return fail.Usage("--server must not be empty")
			}
			return o.Show(c.Context(), args, streamsOf(c))
		},
	}
	rawFlags(c, &o.Input)
	c.Flags().StringVar(&o.Server, "server", "", "show tensors of the server at this `address`, not files")
	identityFlags(c, &o.Access)
	waitFlags(c, &o.Access)
	sourceFlagsOf(c, &o.SourceFlags)
	jsonFlag(c, &o.AsJSON)
	settings.CountIn(c.Flags(), &o.Head, "head", 0, 0, math.MaxInt32, "also print the first `N` elements")
	c.Flags().StringVar(&o.Slice, "slice", "", "show only a `part` of each tensor, such as 0,:,1:10:2")
	c.Flags().BoolVar(&o.Stats, "stats", false, "also read the tensors of a model file")
	quietFlag(c, &o.Quiet)
	return c
}
