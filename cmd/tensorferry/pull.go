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

	sinks := oneSink(out, bars)
	if !o.source {
		// How many it is has to be known before the first byte is out.
		list, err := storedOf(ctx, cl, names)
		if err != nil {
			return err
		}
		selections = selectionsOf(list)
		switch {
		case several:
			sinks, err = sinksOf(out, bars, list)
		case len(list) != 1:
			err = oneTensor(o.output)
		}
		if err != nil {
			return err
		}
	}
	var got []client.Summary
	err = interruptible(ctx, func() error {
		for some := range slices.Chunk(selections, selectionsAtATime) {
			summaries, err := pullTo(ctx, cl, some, sinks)
			if err != nil {
				return missing(err, some)
			}
			got = append(got, summaries...)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := out.commit(); err != nil {
		return err
	}
	bars.end()
	if o.asJSON {
		return tellMoved(stdout, got, true)
	}
	return nil
}

func oneTensor(output string) error {
	return usage("--output %s takes one tensor; a .safetensors file takes many", output)
}

// sink says where the bytes of a tensor go, once it is known what it is.
type sink func(name string, d tensor.Desc) (io.Writer, error)

// oneSink has out take the tensor that comes, and no other: its name may have become
// a glob since it was listed.
func oneSink(out *target, bars *progressBars) sink {
	begun := false
	return func(name string, d tensor.Desc) (io.Writer, error) {
		if begun {
			return nil, oneTensor(out.path)
		}
		begun = true
		w, err := out.open(name, d)
		return bars.tensor(name, d).writer(w), err
	}
}

// sinksOf has out take the tensors of a list: their file begins with what all of
// them are.
func sinksOf(out *target, bars *progressBars, list []client.Stored) (sink, error) {
	tensors := make([]named, len(list))
	for i, s := range list {
		tensors[i] = named{s.Name, s.Desc}
	}
	writers, err := out.begin(tensors)
	if err != nil {
		return nil, err
	}
	type line struct {
		tensor.Desc
		to io.Writer
	}
	lines := make(map[string]line, len(list))
	for i, s := range list {
		lines[s.Name] = line{s.Desc, bars.tensor(s.Name, s.Desc).writer(writers[i])}
	}
	return func(name string, d tensor.Desc) (io.Writer, error) {
		l := lines[name]
		if !l.Equal(d) {
			return nil, fmt.Errorf("tensor %q has changed since it was listed; run it again", name)
		}
		return l.to, nil
	}, nil
}

// pullTo pulls selections into sinks. The first sink that fails ends it: what comes
// after it would be in vain.
func pullTo(ctx context.Context, cl *client.Client, selections []client.Selection, to sink) ([]client.Summary, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	return cl.Pull(ctx, client.PullRequest{Select: selections, To: func(name string, d tensor.Desc) (client.Sink, error) {
		w, err := to(name, d)
		if err != nil {
			cancel(err)
			return client.Sink{}, err
		}
		return client.Writer(func(tensor.Desc) (io.Writer, error) { return cancelling{w, cancel}, nil }), nil
	}})
}

// cancelling tells of the first write that fails.
type cancelling struct {
	w      io.Writer
	cancel context.CancelCauseFunc
}

func (c cancelling) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	if err != nil {
		c.cancel(err)
	}
	return n, err
}
