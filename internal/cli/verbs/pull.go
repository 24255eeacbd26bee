package verbs

import (
	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/internal/cli/moving"
)

func pullCommand() *cobra.Command {
	var o moving.PullOptions
	c := &cobra.Command{
		Use:   "pull NAME...",
		Short: "fetch tensors from a server",
		Long: `Pull downloads tensors from a server's store. With --source, it downloads what a
source of the server generates from --param. Each tensor is checked as it arrives and,
at the end, against the server's digest.

NAME may be a glob: * matches any characters but a slash, ? one such character, [a-z]
one letter, and ** anything. If a tensor has exactly that name, NAME selects only that
tensor. A NAME that ends in a slash is never a tensor's: model/ means model/**.

The output is a .npy file, a .safetensors file if --output ends in .safetensors, a
PyTorch file if it ends in .pt or .pth, or raw bytes with --raw. Only a .safetensors
or .pt file holds more than one tensor: torch.load returns a dict of them or, if NAME is
no glob, the tensor. "-", the default, is stdout. An output file is written completely
or not at all; a device or a pipe is written as the bytes arrive.

Names in a .safetensors or .pt file do not include the folder that all NAMEs share: those
of model/* lose model/. --prefix adds another prefix instead. A .safetensors file gets
its metadata from model/__metadata__. A model that was pushed from several files becomes
one file or, if --output is a new folder (ending in a slash) or an empty one, the same
files again.`,
		Example: `  tensorferry pull x -o x.npy
  tensorferry pull model/ -o model.safetensors
  tensorferry pull llama/ -o models/llama/
  tensorferry pull --source gen -p shape=1000,1000 -p seed=7 | tensorferry show -`,
		Args: Takes(many, "NAME"),
		RunE: func(c *cobra.Command, args []string) error { return o.Pull(c.Context(), args, streamsOf(c)) },
	}
	c.Flags().StringVarP(&o.Output, "output", "o", "-", "`file` or folder to write")
	c.Flags().StringVar(&o.Prefix, "prefix", "", "`text` that replaces the shared folder of names in a .safetensors or .pt file")
	sourceFlagsOf(c, &o.SourceFlags)
	c.Flags().BoolVar(&o.Raw, "raw", false, "write raw bytes")
	remoteFlags(c, &o.Remote)
	pipeFlag(c, &o.Remote)
	return c
}
