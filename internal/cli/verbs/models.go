package verbs

import (
	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/internal/cli/looking"
)

func modelsCommand() *cobra.Command {
	return asking(&cobra.Command{
		Use:   "models",
		Short: "list the models of a server",
		Long: `Models lists the models of a server: their inputs and results with data types and
shapes, and their parameters. In a shape, ? is a dimension of any size, and a leading
... any number of dimensions.

With --json, a dimension is a number, null if it may have any size, or "..." for any
number of dimensions, which can only come first. If dtypes is absent, the model takes
any data type. Rows says how many leading axes of a tensor are independent of each
other: a number, "all_but_last" or "all", always a string; "0" means that the model
needs the whole tensor at once. An input with "whole": true must arrive completely
before the first row is computed; one with "optional": true, in the table NAME?, may
be left out. Params lists what run --param accepts, with
defaults. Where "idempotent" is true, run --retry may repeat a call that has begun.
Where "training" is true, a client trains the model.`,
		Example: `  tensorferry models
  tensorferry models --json`,
		Args: Takes(0),
	}, looking.Models)
}
