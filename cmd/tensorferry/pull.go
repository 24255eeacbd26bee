package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/tensor"
)

// pullOptions are the flags of pull.
type pullOptions struct {
	remote
	output string
	source bool
	params []string
	raw    bool
	asJSON bool
}

func pullCommand() *cobra.Command {
	var o pullOptions
	c := &cobra.Command{
		Use:   "pull NAME...",
		Short: "fetch tensors from a server",
		Long: `Pull downloads tensors from the store of a server, or has a source of the server
make one from --param. Each is checked on its way, and in the end against the
digest that the server has.

NAME may be a glob: * and ? stand for anything but a slash, [a-z] for one letter.
The output is .npy, or .safetensors, which holds any number, if it is named so, or
raw bytes with --raw. "-" is stdout, and the default. An output file is written
whole or not at all.`,
		Example: `  tensorferry pull x -o x.npy
  tensorferry pull 'model/*' -o model.safetensors
  tensorferry pull --source gen -p shape=1000,1000 -p seed=7 | tensorferry show -`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return pull(c.Context(), args, o, c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	f := c.Flags()
	f.StringVarP(&o.output, "output", "o", "-", "`file` to write")
	f.BoolVar(&o.source, "source", false, "NAME is a source of the server, not a tensor")
	f.StringArrayVarP(&o.params, "param", "p", nil, "parameter of the source, `key=value`; repeatable")
	f.BoolVar(&o.raw, "raw", false, "write raw bytes")
	o.flags(c)
	jsonFlag(c, &o.asJSON)
	return c
}

func pull(ctx context.Context, names []string, o pullOptions, stdout, stderr io.Writer) error {
	selections, err := selectionsOf(names, o.source, o.params)
	if err != nil {
		return err
	}
	if o.asJSON && o.output == "-" {
		return usage("--json prints to stdout; name a file with --output")
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

	// A file of several tensors begins with what all of them are.
	var writers map[string]placed
	if strings.HasSuffix(o.output, ".safetensors") && !o.source {
		var list []client.Stored
		if list, err = storedOf(ctx, cl, names); err != nil {
			return err
		}
		tensors := make([]named, len(list))
		selections = nil
		for i, s := range list {
			tensors[i] = named{s.Name, s.Desc}
			selections = append(selections, client.Selection{Name: s.Name})
		}
		all, err := out.begin(tensors)
		if err != nil {
			return err
		}
		writers = make(map[string]placed, len(all))
		for i, w := range all {
			writers[list[i].Name] = placed{w, list[i].Desc}
		}
	} else if len(selections) != 1 {
		return usage("--output %s takes one tensor; a .safetensors file takes many", o.output)
	}
	begun := 0
	request := client.PullRequest{To: func(name string, d tensor.Desc) (client.Sink, error) {
		line := bars.tensor(name, d)
		if writers != nil {
			w := writers[name]
			if !w.desc.Equal(d) {
				return client.Sink{}, fmt.Errorf("tensor %q has changed since it was listed; run it again", name)
			}
			return client.Writer(func(tensor.Desc) (io.Writer, error) { return line.writer(w.writer), nil }), nil
		}
		if begun++; begun > 1 {
			return client.Sink{}, usage("%s picks more than one tensor; --output %s takes one, a .safetensors file many", names[0], o.output)
		}
		return client.Writer(func(d tensor.Desc) (io.Writer, error) {
			w, err := out.open(name, d)
			return line.writer(w), err
		}), nil
	}}
	var got []client.Summary
	err = interruptible(ctx, func() error {
		for len(selections) > 0 { // the server takes so many at a time
			n := min(len(selections), selectionsAtATime)
			request.Select, selections = selections[:n], selections[n:]
			some, err := cl.Pull(ctx, request)
			got = append(got, some...)
			if err != nil {
				return err
			}
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

// placed is where in a file a tensor goes, and what it was when that was decided.
type placed struct {
	writer *tensorWriter
	desc   tensor.Desc
}

// selectionsAtATime is how many tensors one pull names: what a server takes.
const selectionsAtATime = 1000

// selectionsOf are the tensors, globs or sources that a command names.
func selectionsOf(names []string, source bool, params []string) ([]client.Selection, error) {
	values := map[string]string{}
	for _, text := range params {
		k, v, ok := strings.Cut(text, "=")
		if !ok {
			return nil, usage("--param %q has no =; write key=value", text)
		}
		values[k] = v
	}
	if len(values) > 0 && !source {
		return nil, usage("--param is for a source; add --source")
	}
	var list []client.Selection
	for _, n := range names {
		list = append(list, client.Selection{Name: n, Source: source, Params: values})
	}
	return list, nil
}

// storedOf lists the tensors that names and globs pick, each once. One that picks
// nothing is an error.
func storedOf(ctx context.Context, cl *client.Client, names []string) ([]client.Stored, error) {
	var list []client.Stored
	seen := map[string]bool{}
	for _, n := range names {
		some, _, err := cl.List(ctx, n)
		if err == nil && len(some) == 0 { // it may be the name of a tensor, letter by letter
			some, _, err = cl.List(ctx, literally.Replace(n))
		}
		if err != nil {
			return nil, err
		}
		if len(some) == 0 {
			return nil, notStored(n)
		}
		for _, s := range some {
			if !seen[s.Name] {
				seen[s.Name] = true
				list = append(list, s)
			}
		}
	}
	return list, nil
}

// literally makes a glob of a name that matches nothing else.
var literally = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`)

// notStored says that a server has no tensor of a name.
func notStored(name string) error {
	return hinted{fmt.Errorf("the server's store has no tensor %q", name), "tensorferry ls lists what it has"}
}
