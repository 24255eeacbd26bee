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
	"github.com/tensorferry/tensorferry/tensorfile"
)

type pullOptions struct {
	remote
	sourceFlags
	output, prefix string
	raw            bool
}

func pullCommand() *cobra.Command {
	var o pullOptions
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
		Args: takes(many, "NAME"),
		RunE: o.pull,
	}
	c.Flags().StringVarP(&o.output, "output", "o", "-", "`file` or folder to write")
	c.Flags().StringVar(&o.prefix, "prefix", "", "`text` that replaces the shared folder of names in a .safetensors or .pt file")
	o.sourceFlags.flags(c)
	c.Flags().BoolVar(&o.raw, "raw", false, "write raw bytes")
	o.remote.flags(c)
	o.pipeFlag(c)
	return c
}

func (o *pullOptions) pull(c *cobra.Command, names []string) error {
	selections, err := o.selections(names)
	if err != nil {
		return err
	}
	whole := strings.HasSuffix(o.output, tensorfile.FileSuffix) || isTorch(o.output) && (len(names) != 1 || isGlob(names[0]))
	folder := strings.HasSuffix(o.output, "/") || isDir(o.output)
	several := (whole || folder) && !o.source
	switch {
	case o.asJSON && o.output == "-":
		return errJSONOutput
	case o.prefix != "" && (!whole || o.source):
		return usage("--prefix needs a .safetensors file as --output, or a .pt file of several tensors, and no --source")
	case len(selections) != 1 && !several:
		return oneTensor(o.output)
	}
	ctx, stderr := c.Context(), c.ErrOrStderr()
	cl, waiting, err := o.dialPipes(ctx)
	if err != nil {
		return err
	}
	defer cl.Close()
	var out output
	var bars *progressBars
	var writer func(name string, d tensor.Desc) (io.Writer, error)
	if several && !whole {
		out, err = newFolderTarget(o.output)
	} else {
		var t *target
		t, err = newTarget(o.output, o.raw, c.OutOrStdout())
		out, writer = t, func(name string, d tensor.Desc) (io.Writer, error) { return t.open(name, d, bars) }
	}
	if err != nil {
		return err
	}
	defer out.abandon()
	bars = newProgress(stderr, o.quiet, false, cl.Lanes)
	defer func() { bars.end(); o.tell(stderr, cl.Ways()) }()

	var got []client.Summary
	if !o.source {
		list, err := storedOf(ctx, cl, names)
		if err != nil {
			return err
		}
		if several {
			if err := leftOut(ctx, cl, names, list, stderr); err != nil {
				return err
			}
			var beside tensorfile.Document // of the prefix's model file
			prefix := sharedPrefix(names)
			if i := slices.IndexFunc(list, func(s client.Stored) bool { return s.Name == prefix+tensorfile.MetadataName }); i >= 0 {
				if prefix == "" && len(list) > 1 { // of no model: an older server has it
					fmt.Fprintf(stderr, "note: %q is left out: files reserve that name; pull it alone, or remove it\n", list[i].Name)
				} else if beside, got, err = pullDocument(ctx, cl, list[i]); err != nil {
					return err
				}
				list = slices.Delete(list, i, i+1)
			}
			if writer, err = o.begin(out, list, prefix, beside, bars); err != nil {
				return err
			}
		} else if len(list) != 1 {
			list = slices.DeleteFunc(list, func(s client.Stored) bool { return isDocument(s) && !slices.Contains(names, s.Name) })
			if len(list) != 1 {
				return oneTensor(o.output)
			}
		}
		selections = selectionsOf(list)
	}
	summaries, err := interruptible(waiting, func() ([]client.Summary, error) { return pullTo(ctx, cl, selections, writer) })
	got = append(got, summaries...)
	if err == nil {
		err = out.commit()
	}
	if err != nil || !o.asJSON {
		return err
	}
	bars.end()
	return printMoved(printer{c.OutOrStdout(), true}, got)
}

// begin begins an output of the listed tensors, and returns what returns the writer of each.
// In a file, --prefix replaces the prefix of names.
func (o *pullOptions) begin(out output, list []client.Stored, prefix string, beside tensorfile.Document, bars *progressBars) (func(name string, d tensor.Desc) (io.Writer, error), error) {
	writers, err := out.begin(each(list, func(s client.Stored) tensorfile.Entry {
		name := s.Name
		if rest, ok := strings.CutPrefix(name, prefix); ok {
			name = o.prefix + rest
		}
		return tensorfile.Entry{Name: name, Desc: s.Desc}
	}), beside)
	if err != nil {
		return nil, err
	}
	byName := make(map[string]*tensorWriter, len(list))
	for i, s := range list {
		byName[s.Name] = writers[i]
		writers[i].bar = bars.tensor(s.Name, s.Desc)
	}
	return func(name string, d tensor.Desc) (io.Writer, error) {
		w, ok := byName[name]
		if !ok || !w.Desc.Equal(d) {
			return nil, fmt.Errorf(changed, name)
		}
		return w, nil
	}, nil
}

func oneTensor(output string) error {
	return usage("--output %s takes one tensor; use a .safetensors or .pt file for several", output)
}

// sharedPrefix returns the folder that all names share: model/ for model/*, and none for x.
func sharedPrefix(names []string) (shared string) {
	for i, n := range names {
		if at := strings.IndexAny(n, globs+`\`); at >= 0 {
			n = n[:at]
		}
		folder := n[:strings.LastIndexByte(n, '/')+1]
		if i == 0 {
			shared = folder
		}
		for !strings.HasPrefix(folder, shared) {
			shared = shared[:strings.LastIndexByte(strings.TrimSuffix(shared, "/"), '/')+1]
		}
	}
	return shared
}

// leftOut reports tensors that a glob such as model/* does not match because their names
// have more slashes: they would be missing from a model file.
func leftOut(ctx context.Context, cl *client.Client, names []string, list []client.Stored, stderr io.Writer) error {
	have := namesOf(list)
	for _, n := range names {
		if !strings.HasSuffix(n, "/*") {
			continue
		}
		rest, err := others(ctx, cl, n+"*", have)
		if err != nil {
			return err
		}
		if len(rest) > 0 {
			fmt.Fprintf(stderr, "note: %q leaves out %d tensors such as %q; use %q to include them\n", n, len(rest), rest[0].Name, n+"*")
		}
	}
	return nil
}

// pullTo pulls selections into the writers that to returns, until one fails.
func pullTo(ctx context.Context, cl *client.Client, selections []client.Selection, to func(string, tensor.Desc) (io.Writer, error)) ([]client.Summary, error) {
	if len(selections) == 0 {
		return nil, nil
	}
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

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
