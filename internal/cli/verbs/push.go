package verbs

import (
	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/internal/cli/moving"
)

func pushCommand() *cobra.Command {
	var o moving.PushOptions
	c := &cobra.Command{
		Use:   "push [NAME=]FILE...",
		Short: "store tensors on a server",
		Long: `Push uploads tensors to a server's store, each under a name. When it succeeds, every
tensor is stored completely and has been checked; if the store is a folder, it is on
disk. An existing tensor of the same name is replaced atomically.

FILE is one of
  x.npy              stored as x; so is a .pt or .pth file of one tensor
  model.safetensors  its tensors are stored as model/ and their own names; .npz files, and
                     .pt files of a dict of tensors, are stored in the same way
  FILE:name          only one tensor of a .safetensors, .npz or .pt file
  FOLDER             the model in it, one or more .safetensors files; for several, their
                     .safetensors.index.json means the same
  -                  stdin, which needs a NAME
With --dtype and --shape, FILE and stdin are raw bytes.

NAME=FILE stores one tensor as NAME, and those of a whole file as NAME/ and their own
names. The metadata of a model file is stored as NAME/__metadata__, so pull 'NAME/**'
restores the file. An = may also be part of a file's name: if the file lr=0.1.npy
exists, lr=0.1.npy pushes that file.

Push prints what it has stored. If some tensors fail or have an unsupported data type,
the others are still stored; with --all, none is, and nobody ever sees some of them.
A full store refuses tensors. If the server evicts others instead (serve --store
memory:SIZE,evict=lru), push says so, and those of this push count as failed.`,
		Example: `  tensorferry push x.npy model.safetensors models/llama/
  tensorferry push experiments/7/x=x.npy
  tensorferry gen --shape 1000,1000 | tensorferry push noise=-
  tensorferry push y=y.bin --dtype float32 --shape 1000,64`,
		Args: Takes(many, "FILE"),
		RunE: func(c *cobra.Command, args []string) error { return o.Push(c.Context(), args, streamsOf(c)) },
	}
	rawFlags(c, &o.Input)
	remoteFlags(c, &o.Remote)
	pipeFlag(c, &o.Remote)
	c.Flags().BoolVar(&o.All, "all", false, "store all tensors together, or none")
	c.Flags().StringArrayVar(&o.Metadata, "metadata", nil, "store `key=value` with each tensor, for people; repeatable")
	return c
}
