package verbs

import (
	"context"
	"errors"
	"io"
	"runtime"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/cli/files"
	"github.com/tensorferry/tensorferry/store/generate"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// genChunk is how many bytes a goroutine generates at a time.
const genChunk = 1 << 20

type genOptions struct {
	dtype, shape, fill string
	seed               uint64
	name               string
	output             string
	raw, quiet, asJSON bool
}

func genCommand() *cobra.Command {
	var o genOptions
	c := &cobra.Command{
		Use:   "gen --shape SHAPE",
		Short: "generate a tensor from a seed",
		Long: `Gen generates a tensor. Data type, shape, seed and fill determine every bit of it,
on every machine.

The fills are
  normal   N(0, 1); the default for floats and complex numbers, and only for these
  uniform  floats in [0, 1), or integers over their whole range; the default for
           integers and bool
  zeros    every element is 0
  count    each element is its index

The output is a .npy file, a .safetensors file if --output ends in .safetensors, a
PyTorch file if it ends in .pt, or raw bytes with --raw. "-", the default, is stdout. An
output file is written completely or not at all.`,
		Example: `  tensorferry gen --shape 1000,64 -o x.npy
  tensorferry gen --shape 4096,4096 --dtype bfloat16 --seed 7 --name weight -o w.safetensors
  tensorferry gen --shape 1000000000 --dtype uint8 --raw |
      tensorferry run echo --dtype uint8 --shape 1000000000 > y.bin`,
		Args: Takes(0),
		RunE: o.gen,
	}
	f := c.Flags()
	dtypeFlag(c, &o.dtype, "float32", "data `type`")
	f.StringVar(&o.shape, "shape", "", "`shape`, such as 1000,64; empty is a scalar (required)")
	f.Uint64Var(&o.seed, "seed", 0, "`number` used as the random seed")
	f.StringVar(&o.fill, "fill", "", strings.Join(generate.Fills(), ", ")+" (default depends on the data type)")
	f.StringVar(&o.name, "name", "tensor", "name of the tensor in a .safetensors file")
	f.StringVarP(&o.output, "output", "o", "-", "`file` to write")
	f.BoolVar(&o.raw, "raw", false, "write raw bytes")
	quietFlag(c, &o.quiet)
	jsonFlag(c, &o.asJSON)
	complete(c, "fill", generate.Fills())
	return c
}

func (o *genOptions) gen(c *cobra.Command, _ []string) error {
	switch {
	case !c.Flag("shape").Changed:
		return fail.Usage("missing --shape; --shape '' is a scalar")
	case c.Flag("name").Changed && !strings.HasSuffix(o.output, tensorfile.FileSuffix):
		return fail.Usage("--name needs a .safetensors file, not --output %s", o.output)
	case o.name == "":
		return fail.Usage("--name must not be empty")
	case o.asJSON && o.output == "-":
		return fail.Usage(files.JSONOutput)
	}
	d, size, err := files.ParseDesc(o.dtype, o.shape)
	if err != nil {
		return err
	}
	fill, err := generate.ParseFill(o.fill, d.DType)
	if err != nil {
		return fail.AsUsage(err)
	}
	t, err := files.NewTarget(o.output, o.raw, c.OutOrStdout())
	if err != nil {
		return err
	}
	defer t.Abandon()
	bars := files.NewProgress(c.ErrOrStderr(), o.quiet || o.output == "-", false, nil) // the reader of a pipe shows its own progress
	defer bars.End()
	ctx := c.Context()
	_, err = files.Interruptible(ctx, func() (any, error) {
		w, err := t.Open(o.name, d, bars)
		if errors.Is(err, tensorfile.ErrUnsupported) { // --dtype does not fit --output
			err = fail.AsUsage(err)
		}
		if err != nil {
			return nil, err
		}
		return nil, writeGenerated(ctx, w, size, d.DType, o.seed, fill)
	})
	if err != nil {
		return err
	}
	if err := t.Commit(); err != nil || !o.asJSON {
		return err
	}
	bars.End()
	return display.JSON(c.OutOrStdout(), t.Written(""))
}

// writeGenerated generates one chunk per CPU at a time and writes them in order.
func writeGenerated(ctx context.Context, w io.Writer, size int64, dtype tensor.DataType, seed uint64, fill generate.Fill) error {
	buf := make([]byte, min(size, int64(runtime.GOMAXPROCS(0))*genChunk))
	for off := int64(0); off < size; off += int64(len(buf)) {
		buf = buf[:min(int64(len(buf)), size-off)]
		var made sync.WaitGroup
		for at := 0; at < len(buf); at += genChunk {
			made.Go(func() { generate.Bytes(buf[at:min(at+genChunk, len(buf))], off+int64(at), dtype, seed, fill) })
		}
		made.Wait()
		if err := ctx.Err(); err != nil {
			return err
		}
		if _, err := w.Write(buf); err != nil {
			return err
		}
	}
	return nil
}
