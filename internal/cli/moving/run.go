package moving

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

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/cli/files"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/tensor"
)

// RunOptions are the flags of run.
type RunOptions struct {
	Remote
	Inputs, Outputs, Params []string
	Input                   files.RawInput
	Raw, Sequence           bool
	Timeout                 time.Duration
}

// Run runs a model over files.
func (o *RunOptions) Run(ctx context.Context, model string, std files.Streams) error {
	stdout, stderr := std.Out, std.Err
	params, err := paramsOf("--param", o.Params)
	if err := cmp.Or(err, o.Input.Check()); err != nil {
		return err
	}
	if o.Sequence {
		return o.sequence(ctx, model, params, std)
	}
	r := client.Request{Model: model, Timeout: o.Timeout, Params: params, Results: map[string]client.Sink{}}
	cl, waiting, err := o.dialPipes(ctx)
	if err != nil {
		return err
	}
	defer cl.Close()
	find := sync.OnceValues(func() (client.Model, error) {
		return FindModel(ctx, cl, model, "tensorferry models"+reason.Asked+" lists its models")
	})
	if len(o.Inputs) == 0 {
		m, err := find()
		if err != nil {
			return err
		}
		if len(m.Inputs) > 0 {
			o.Inputs = []string{"-"}
		}
	}
	bars := files.NewProgress(stderr, o.Quiet, true, cl.Lanes)
	defer bars.End()
	opener := files.Opener{Raw: o.Input, Stdin: std.In, Idle: o.Cfg.InputIdle}
	for _, text := range o.Inputs {
		port, file := files.NameOf(text)
		if slices.ContainsFunc(r.Inputs, func(in client.Input) bool { return in.Port == port }) {
			return fail.Usage("--input %s: the port already has an input; use port=file, once per port", text)
		}
		found, err := opener.Open(ctx, file)
		if err != nil {
			return files.HintMissing(text, file, err)
		}
		if n := len(found.Tensors) + len(found.Unknown); n != 1 {
			return fail.Usage("%s has %d tensors; select one as %s:name", file, n, found.Path)
		}
		if err := found.Errors(); err != nil {
			return err
		}
		in := found.Tensors[0]
		in.Port, in.Name = port, ""
		bars.Input(in)
		r.Inputs = append(r.Inputs, in.Input)
	}
	m, err := find()
	if err != nil {
		return err
	}
	ports := display.Each(m.Inputs, portName)
	for _, in := range r.Inputs {
		if in.Port != "" && !slices.Contains(ports, in.Port) {
			return fail.Usage("--input %s=…: model %q has no input %q; it has %s", in.Port, model, in.Port, strings.Join(ports, ", "))
		}
	}
	outs, err := results(m, o.Outputs)
	if err != nil {
		return err
	}
	targets := map[string]*files.Target{} // by port
	defer func() {
		for _, f := range targets {
			f.Abandon()
		}
	}()
	for port, path := range outs {
		t, err := files.NewTarget(path, o.Raw || o.Input.Given() && !files.DescribesItself(path), stdout)
		if err != nil {
			return err
		}
		for _, other := range targets {
			if other.Real == t.Real && !t.Special { // several may share a device
				err = fail.Usage("--output %s and --output %s are the same file", other.Path, path)
			}
		}
		if o.AsJSON && t.Real == "-" {
			err = fail.Usage(files.JSONOutput)
		}
		targets[port] = t
		if err != nil {
			return err
		}
		r.Results[port] = client.Writer(func(d tensor.Desc) (io.Writer, error) { return t.Open(port, d, bars) })
	}
	defer func() { bars.End(); o.printWays(stderr, cl.Ways()) }()
	call, err := cl.Call(ctx, r)
	if err != nil {
		return err
	}
	if _, err := files.Interruptible(waiting, call.Wait); status.Code(err) == codes.Internal {
		return fail.Hinted(err, "tensorferry info"+reason.Asked+" --call "+call.ID().String()+" shows why")
	} else if err != nil {
		return err
	}
	for _, f := range targets {
		if err := f.Commit(); err != nil {
			return err
		}
	}
	bars.Complete()
	if o.Timings {
		t := call.Timings()
		bars.End()
		fmt.Fprintf(stderr, "total %v: waited for memory %v, received %v, h2d %v, computed %v, d2h %v; first result after %v, exposed %v\n",
			rounded(t.Total), rounded(t.Queue), rounded(t.Receive), rounded(t.H2D), rounded(t.Compute), rounded(t.D2H), rounded(t.FirstResult), rounded(t.Exposed()))
	}
	if !o.AsJSON {
		return nil
	}
	bars.End()
	list := display.Each(slices.Sorted(maps.Keys(targets)), func(port string) files.WrittenJSON { return targets[port].Written(port) })
	t := call.Timings()
	return display.JSON(stdout, map[string]any{"call": call.ID().String(), "results": list, "seconds": map[string]float64{ // as the server measured them
		"total": t.Total.Seconds(), "queue": t.Queue.Seconds(), "receive": t.Receive.Seconds(), "h2d": t.H2D.Seconds(),
		"compute": t.Compute.Seconds(), "d2h": t.D2H.Seconds(), "first_result": t.FirstResult.Seconds(), "exposed": t.Exposed().Seconds(),
	}})
}

func rounded(d time.Duration) time.Duration { return d.Round(time.Microsecond) }

// FindModel returns a model of the server; if it has none of this name, the error has the hint.
func FindModel(ctx context.Context, cl *client.Client, name, hint string) (m client.Model, err error) {
	models, err := cl.Models(ctx)
	if err != nil {
		return m, err
	}
	if i := slices.IndexFunc(models, func(m client.Model) bool { return m.Name == name }); i >= 0 {
		return models[i], nil
	}
	return m, fail.Hinted(fmt.Errorf("the server has no model %q", name), hint)
}

func portName(p client.Port) string { return p.Name }

// results returns the file for each result of a model, by port.
func results(m client.Model, outputs []string) (map[string]string, error) {
	model := m.Name
	ports := display.Each(m.Outputs, portName)
	if len(outputs) == 0 {
		if len(ports) != 1 {
			return nil, fail.Usage("model %q has the results %s; use --output port=file for each", model, strings.Join(ports, ", "))
		}
		return map[string]string{ports[0]: "-"}, nil
	}
	to := map[string]string{}
	for _, text := range outputs {
		port, file, ok := strings.Cut(text, "=")
		switch {
		case !ok, strings.Contains(port, "/"): // any = is part of the file's name
			if len(ports) != 1 {
				return nil, fail.Usage("--output %s: model %q has the results %s; use port=file", text, model, strings.Join(ports, ", "))
			}
			port, file = ports[0], text
		case !slices.Contains(ports, port):
			return nil, fail.Usage("--output %s: model %q has no result %q; it has %s; for a file of this name use ./%s", text, model, port, strings.Join(ports, ", "), text)
		}
		if other, ok := to[port]; ok {
			return nil, fail.Usage("result %q has two outputs, %s and %s; use one", port, other, file)
		}
		to[port] = file
	}
	for _, p := range ports {
		if _, ok := to[p]; !ok {
			return nil, fail.Usage("result %q of model %q has no output; add --output %s=file", p, model, p)
		}
	}
	return to, nil
}
