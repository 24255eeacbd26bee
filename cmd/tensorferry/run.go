package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/tensor"
)

type runOptions struct {
	remote
	inputs, outputs, params []string
	input                   rawInput
	raw                     bool
	timeout                 time.Duration
}

func runCommand() *cobra.Command {
	var o runOptions
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

Raw input that is longer than its shape is an error, except from a device. Run does
not wait for a pipe to be closed.`,
		Example: `  tensorferry run relu --input x.npy --output y.npy
  cat x.bin | tensorferry run affine --param a=2 --param b=1 --dtype float32 --shape 1000,64 > y.bin
  tensorferry run trunk --input h=weights.safetensors:hidden --output y.npy`,
		Args: takes(1, "MODEL"),
		RunE: o.run,
	}
	f := c.Flags()
	f.StringArrayVarP(&o.inputs, "input", "i", nil, "input `[port=]file`; repeatable")
	f.StringArrayVarP(&o.outputs, "output", "o", nil, "result `[port=]file`; repeatable")
	f.StringArrayVarP(&o.params, "param", "p", nil, "parameter of the model, `key=value`; repeatable")
	o.input.flags(c)
	f.BoolVar(&o.raw, "raw", false, "write results as raw bytes")
	o.remote.flags(c)
	o.pipeFlag(c)
	durationVar(f, &o.timeout, "timeout", 0, 0, "time limit of the call on the server; 0 is no limit")
	return c
}

func (o *runOptions) run(c *cobra.Command, args []string) error {
	ctx, model, stdout, stderr := c.Context(), args[0], c.OutOrStdout(), c.ErrOrStderr()
	params, err := paramsOf("--param", o.params)
	if err := cmp.Or(err, o.input.check()); err != nil {
		return err
	}
	r := client.Request{Model: model, Timeout: o.timeout, Params: params, Results: map[string]client.Sink{}}
	cl, waiting, err := o.dialPipes(ctx)
	if err != nil {
		return err
	}
	defer cl.Close()
	find := sync.OnceValues(func() (client.Model, error) {
		return findModel(ctx, cl, model, "tensorferry models"+atServer+" lists its models")
	})
	if len(o.inputs) == 0 {
		m, err := find()
		if err != nil {
			return err
		}
		if len(m.Inputs) > 0 {
			o.inputs = []string{"-"}
		}
	}
	bars := newProgress(stderr, o.quiet, true, cl.Lanes)
	defer bars.end()
	opener := opener{raw: o.input, stdin: c.InOrStdin(), idle: o.cfg.InputIdle}
	for _, text := range o.inputs {
		port, file := nameOf(text)
		if slices.ContainsFunc(r.Inputs, func(in client.Input) bool { return in.Port == port }) {
			return usage("--input %s: the port already has an input; use port=file, once per port", text)
		}
		found, err := opener.open(ctx, file)
		if err != nil {
			return neither(text, file, err)
		}
		if n := len(found.tensors) + len(found.unknown); n != 1 {
			return usage("%s has %d tensors; select one as %s:name", file, n, found.path)
		}
		if err := found.errors(); err != nil {
			return err
		}
		in := found.tensors[0]
		in.Port, in.Name = port, ""
		bars.input(in)
		r.Inputs = append(r.Inputs, in.Input)
	}
	m, err := find()
	if err != nil {
		return err
	}
	ports := each(m.Inputs, portName)
	for _, in := range r.Inputs {
		if in.Port != "" && !slices.Contains(ports, in.Port) {
			return usage("--input %s=…: model %q has no input %q; it has %s", in.Port, model, in.Port, strings.Join(ports, ", "))
		}
	}
	outs, err := results(m, o.outputs)
	if err != nil {
		return err
	}
	files := map[string]*target{} // by port
	defer func() {
		for _, f := range files {
			f.abandon()
		}
	}()
	for port, path := range outs {
		t, err := newTarget(path, o.raw || o.input.given() && !describesItself(path), stdout)
		if err != nil {
			return err
		}
		for _, other := range files {
			if other.real == t.real && !t.special { // several may share a device
				err = usage("--output %s and --output %s are the same file", other.path, path)
			}
		}
		if o.asJSON && t.real == "-" {
			err = errJSONOutput
		}
		files[port] = t
		if err != nil {
			return err
		}
		r.Results[port] = client.Writer(func(d tensor.Desc) (io.Writer, error) { return t.open(port, d, bars) })
	}
	defer func() { bars.end(); o.tell(stderr, cl.Ways()) }()
	call, err := cl.Call(ctx, r)
	if err != nil {
		return err
	}
	if _, err := interruptible(waiting, call.Wait); status.Code(err) == codes.Internal {
		return hinted{err, "tensorferry info" + atServer + " --call " + call.ID().String() + " shows why"}
	} else if err != nil {
		return err
	}
	for _, f := range files {
		if err := f.commit(); err != nil {
			return err
		}
	}
	bars.whole()
	if o.timings {
		t := call.Timings()
		bars.end()
		fmt.Fprintf(stderr, "total %v: waited for memory %v, received %v, h2d %v, computed %v, d2h %v; first result after %v, exposed %v\n",
			about(t.Total), about(t.Queue), about(t.Receive), about(t.H2D), about(t.Compute), about(t.D2H), about(t.FirstResult), about(t.Exposed()))
	}
	if !o.asJSON {
		return nil
	}
	bars.end()
	list := each(slices.Sorted(maps.Keys(files)), func(port string) writtenJSON { return files[port].written(port) })
	t := call.Timings()
	return writeJSON(stdout, map[string]any{"call": call.ID().String(), "results": list, "seconds": map[string]float64{ // as the server measured them
		"total": t.Total.Seconds(), "queue": t.Queue.Seconds(), "receive": t.Receive.Seconds(), "h2d": t.H2D.Seconds(),
		"compute": t.Compute.Seconds(), "d2h": t.D2H.Seconds(), "first_result": t.FirstResult.Seconds(), "exposed": t.Exposed().Seconds(),
	}})
}

func about(d time.Duration) time.Duration { return d.Round(time.Microsecond) }

// findModel returns a model of the server; if it has none of this name, the error has the hint.
func findModel(ctx context.Context, cl *client.Client, name, hint string) (m client.Model, err error) {
	models, err := cl.Models(ctx)
	if err != nil {
		return m, err
	}
	if i := slices.IndexFunc(models, func(m client.Model) bool { return m.Name == name }); i >= 0 {
		return models[i], nil
	}
	return m, hinted{fmt.Errorf("the server has no model %q", name), hint}
}

func portName(p client.Port) string { return p.Name }

// results returns the file for each result of a model, by port.
func results(m client.Model, outputs []string) (map[string]string, error) {
	model := m.Name
	ports := each(m.Outputs, portName)
	if len(outputs) == 0 {
		if len(ports) != 1 {
			return nil, usage("model %q has the results %s; use --output port=file for each", model, strings.Join(ports, ", "))
		}
		return map[string]string{ports[0]: "-"}, nil
	}
	to := map[string]string{}
	for _, text := range outputs {
		port, file, ok := strings.Cut(text, "=")
		switch {
		case !ok, strings.Contains(port, "/"): // any = is part of the file's name
			if len(ports) != 1 {
				return nil, usage("--output %s: model %q has the results %s; use port=file", text, model, strings.Join(ports, ", "))
			}
			port, file = ports[0], text
		case !slices.Contains(ports, port):
			return nil, usage("--output %s: model %q has no result %q; it has %s; for a file of this name use ./%s", text, model, port, strings.Join(ports, ", "), text)
		}
		if other, ok := to[port]; ok {
			return nil, usage("result %q has two outputs, %s and %s; use one", port, other, file)
		}
		to[port] = file
	}
	for _, p := range ports {
		if _, ok := to[p]; !ok {
			return nil, usage("result %q of model %q has no output; add --output %s=file", p, model, p)
		}
	}
	return to, nil
}
