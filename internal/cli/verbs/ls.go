package verbs

import (
	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/internal/cli/looking"
)

func lsCommand() *cobra.Command {
	return asking(&cobra.Command{
		Use:   "ls [NAME...]",
		Short: "list the tensors and sources of a server",
		Long: `Ls lists the tensors in a server's store and, without a NAME, the sources for pull
--source. NAME may be a glob, as for pull. model/__metadata__ holds the metadata of a
model file, which show prints.

With --json, a tensor has a digest once the server has computed it: when it is pushed
or, for a tensor of a file in the server's folder, when it is first pulled.`,
		Example: `  tensorferry ls
  tensorferry ls 'model/*' --json`,
		Args: cobra.ArbitraryArgs,
	}, looking.List)
}
