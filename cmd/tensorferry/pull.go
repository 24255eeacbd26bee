package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/tensor"
)

// pullOptions are the flags of pull.
type pullOptions struct {
	remote
	sourceFlags
	output string
	raw    bool
	asJSON bool
}

func pullCommand() *cobra.Command {
	var o pullOptions
	c := &cobra.Command{
		Use:   "pull NAME...",
		Short: "fetch tensors from a server",
		Long: `Pull downloads tensors from the store of a server, or what one of its sources yields
for --param. Each is checked on its way, and in the end against the digest that the
server has.

NAME may be a glob: * and ? stand for anything but a slash, [a-z] for one letter.
If there is a tensor of that very name, it is that one.

The output is .npy, or .safetensors, which holds any number, if it is named so, or
raw bytes with --raw. "-" is stdout, and the default. An output file is written
whole or not at all; a device or a pipe as it comes.`,
		Example: `  tensorferry pull x -o x.npy
  tensorferry pull 'model/*' -o model.safetensors
  tensorferry pull --source gen -p shape=1000,1000 -p seed=7 | tensorferry show -`,
		Args: takes(many, "NAME"),
		RunE: func(c *cobra.Command, args []string) error {
			return pull(c.Context(), args, o, c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	c.Flags().StringVarP(&o.output, "output", "o", "-", "`file` to write")
	o.sourceFlags.flags(c)
	c.Flags().BoolVar(&o.raw, "raw", false, "write raw bytes")
	o.remote.flags(c)
	jsonFlag(c, &o.asJSON)
	c.ValidArgsFunction = completeStored
	return c
}

func pull(ctx context.Context, names []string, o pullOptions, stdout, stderr io.Writer) error {
	selections, err := o.selections(names)
	if err != nil {
		return err
	}
	if o.asJSON && o.output == "-" {
		return usage("--json prints to stdout; name a file with --output")
	}
	several := strings.HasSuffix(o.output, ".safetensors") && !o.source
	if len(selections) != 1 && !several {
		return oneTensor(o.output)
	}
	cl, err := o.dial()
	if err != nil {
		return err
	}
	defer cl.Close()
	out, err := newTarget(o.output, o.raw, stdout)
	if err != nil {
		return err
	}
	defer out.abandon()
	bars := newProgress(stderr, o.quiet)
	defer bars.end()

	to := pulled{out: out, bars: bars}
	if !o.source {
		// Before the first byte is out it must be known how many tensors there are.
		list, err := storedOf(ctx, cl, names)
		if err != nil {
			return err
		}
		selections = selectionsOf(list)
		switch {
		case several:
			err = to.begin(list)
		case len(list) != 1:
			err = oneTensor(o.output)
		}
		if err != nil {
			return err
		}
	}
	got, err := interruptible(ctx, func() (got []client.Summary, _ error) {
		for some := range slices.Chunk(selections, selectionsAtATime) {
			summaries, err := pullTo(ctx, cl, some, to.writer)
			if err != nil {
				return nil, missing(err, some)
			}
			got = append(got, summaries...)
		}
		return got, nil
	})
	if err != nil {
		return err
	}
	if err := out.commit(); err != nil {
		return err
	}
	bars.end()
	if !o.asJSON {
		return nil
	}
	return printMoved(printer{stdout, true}, got)
}

func oneTensor(output string) error {
	return usage("--output %s takes one tensor; a .safetensors file takes many", output)
}

// pulled is where the tensors of a pull go.
type pulled struct {
	out     *target
	bars    *progressBars
	tensors map[string]place // nil until begin
}

type place struct {
	tensor.Desc
	io.Writer
}

// begin begins an output of the tensors of a list.
func (p *pulled) begin(list []client.Stored) error {
	all := make([]named, len(list))
	for i, s := range list {
		all[i] = named{s.Name, s.Desc}
	}
	writers, err := p.out.begin(all)
	if err != nil {
		return err
	}
	p.tensors = make(map[string]place, len(list))
	for i, n := range all {
		p.tensors[n.name] = place{n.Desc, io.MultiWriter(writers[i], p.bars.tensor(n.name, n.Desc))}
	}
	return nil
}

// writer returns where a tensor goes that the server sends. It begins an output of one
// tensor.
func (p *pulled) writer(name string, d tensor.Desc) (io.Writer, error) {
	if p.tensors == nil {
		if err := p.begin([]client.Stored{{Name: name, Desc: d}}); err != nil {
			return nil, err
		}
	}
	at := p.tensors[name]
	if !at.Equal(d) {
		return nil, fmt.Errorf("tensor %q has changed since it was listed; run it again", name)
	}
	return at, nil
}

// pullTo pulls selections into the writers that to returns. The first failure of one
// ends it: the rest would be in vain.
func pullTo(ctx context.Context, cl *client.Client, selections []client.Selection, to func(string, tensor.Desc) (io.Writer, error)) ([]client.Summary, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	return cl.Pull(ctx, client.PullRequest{Select: selections, To: func(name string, d tensor.Desc) (client.Sink, error) {
		w, err := to(name, d)
		if err != nil {
			cancel(err)
			return client.Sink{}, err
		}
		cancelling := writerFunc(func(p []byte) (int, error) {
			n, err := w.Write(p)
			if err != nil {
				cancel(err)
			}
			return n, err
		})
		return client.Writer(func(tensor.Desc) (io.Writer, error) { return cancelling, nil }), nil
	}})
}

// writerFunc is a function that is a writer.
type writerFunc func(p []byte) (int, error)

// Write lends p to f.
func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
