package verbs

import (
	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/internal/cli/moving"
	"github.com/tensorferry/tensorferry/internal/cli/settings"
)

func runCommand() *cobra.Command {
	var o moving.RunOptions
	c := &cobra.Command{
		Use:   "run MODEL",
		Short: "run a model over a file or a pipe",
		Long: `Run sends tensors through a model on a server and writes the results as they arrive,
so a tensor may be larger than the memory of either side.

Inputs and outputs are .npy files, or .safetensors or PyTorch files (.pt, .pth) if their
names say so; an input FILE:name is one tensor of a .safetensors, .npz or .pt file. With
--dtype and --shape, the input is raw bytes, and so is the output unless its name ends in
.npy, .safetensors or .pt; --raw makes only the output raw. "-", the default, is stdin or
stdout.
An output file is written completely or not at all; a device or a pipe is written as
the results arrive.

-i x=a.npy reads input x from a.npy, unless there is a file x=a.npy. -o y=b.npy writes
result y to b.npy; to write a file y=b.npy, use -o ./y=b.npy.

With --sequence, run reads raw rows from stdin, sends those that have arrived as the next
step of a sequence, whose state stays on the server, and writes theirs of the result.
--shape says how many rows there are at most, along its first axis, or along the second if
the first is 1, as for the positions of a transformer. --timeout is for each step.

Raw input that is longer than its shape is an error, except from a device. Run does
not wait for a pipe to be closed.`,
		Example: `  tensorferry run relu --input x.npy --output y.npy
  cat x.bin | tensorferry run affine --param a=2 --param b=1 --dtype float32 --shape 1000,64 > y.bin
  bottom | tensorferry run trunk --sequence --dtype float32 --shape 1,512,768 | top
  tensorferry run trunk --input h=weights.safetensors:hidden --output y.npy`,
		Args: Takes(1, "MODEL"),
		RunE: func(c *cobra.Command, args []string) error { return o.Run(c.Context(), args[0], streamsOf(c)) },
	}
	f := c.Flags()
	f.StringArrayVarP(&o.Inputs, "input", "i", nil, "input `[port=]file`; repeatable")
	f.StringArrayVarP(&o.Outputs, "output", "o", nil, "result `[port=]file`; repeatable")
	f.StringArrayVarP(&o.Params, "param", "p", nil, "parameter of the model, `key=value`; repeatable")
	rawFlags(c, &o.Input)
	f.BoolVar(&o.Raw, "raw", false, "write results as raw bytes")
	f.BoolVar(&o.Sequence, "sequence", false, "run the model on rows as they come, with a state on the server")
	remoteFlags(c, &o.Remote)
	pipeFlag(c, &o.Remote)
	settings.Duration(f, &o.Timeout, "timeout", 0, 0, "time limit of the call on the server; 0 is no limit")
	return c
}
