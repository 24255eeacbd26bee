package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/tensor"
)

func modelsCommand() *cobra.Command {
	return asking(&cobra.Command{
		Use:   "models",
		Short: "list the models of a server",
		Long: `Models lists the models of a server: their inputs and results with data types and
shapes, and their parameters. In a shape, ? is a dimension of any size, and a leading
... any number of dimensions.

With --json, a dimension is a number, null if it may have any size, or "..." for any
number of dimensions, which can only come first. If dtypes is absent, the model takes
any data type. Rows says how many leading axes of a tensor are independent of each
other: a number, "all_but_last" or "all", always a string; "0" means that the model
needs the whole tensor at once. An input with "whole": true must arrive completely
before the first row is computed. Params lists what run --param accepts, with
defaults. Where "idempotent" is true, run --retry may repeat a call that has begun.
Where "training" is true, a client trains the model.`,
		Example: `  tensorferry models
  tensorferry models --json`,
		Args: takes(0),
	}, models)
}

func models(ctx context.Context, cl *client.Client, _ []string, out printer) error {
	list, err := cl.Models(ctx)
	if err != nil {
		return err
	}
	known, err := cl.Info(ctx)
	if err != nil {
		return err
	}
	training := make(map[string]bool)
	for _, m := range known.Models {
		training[m.Name] = m.Gauges["training_lease"] > 0
	}
	listed := each(list, func(m client.Model) modelJSON {
		rows := cmp.Or(rowsWords[m.Rows], strconv.Itoa(m.Rows))
		return modelJSON{m.Name, m.Version, m.Device, each(m.Inputs, portOf), each(m.Outputs, portOf), rows, m.Params, m.Idempotent, training[m.Name], m.About}
	})
	return out.print(listed, func(w io.Writer) {
		fmt.Fprintln(w, "NAME\tVERSION\tDEVICE\tINPUTS\tRESULTS\tPARAMS")
		for _, m := range listed {
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", plain(m.Name), plain(m.Version), plain(m.Device), portText(m.Inputs), portText(m.Outputs), paramText(m.Params))
		}
		for _, m := range listed {
			if m.Training {
				fmt.Fprintf(w, "\n%s: a client trains it\n", plain(m.Name))
			}
		}
	})
}

type modelJSON struct {
	Name       string            `json:"name"`
	Version    string            `json:"version,omitempty"`
	Device     string            `json:"device,omitempty"`
	Inputs     []portJSON        `json:"inputs"`
	Outputs    []portJSON        `json:"outputs"`
	Rows       string            `json:"rows"`
	Params     []client.Param    `json:"params,omitempty"`
	Idempotent bool              `json:"idempotent,omitempty"`
	Training   bool              `json:"training,omitempty"` // somebody has its lease
	About      map[string]string `json:"about,omitempty"`
}

func paramText(params []client.Param) string {
	return strings.Join(each(params, func(p client.Param) string {
		return plain(p.Name + "=" + cmp.Or(p.Default, "<"+p.Kind+">"))
	}), " ")
}

type portJSON struct {
	Name   string   `json:"name"`
	DTypes []string `json:"dtypes,omitempty"` // absent: any
	Shape  []any    `json:"shape"`            // numbers, null, "..."
	Whole  bool     `json:"whole,omitempty"`
}

// What models --json prints for the numbers of rows and of a shape that are not counts.
var (
	rowsWords = map[int]string{engine.AllAxes: "all", engine.AllButLast: "all_but_last"}
	dimWords  = map[int64]any{engine.AnyAxes: "...", engine.Free: nil}
)

func portOf(p client.Port) portJSON {
	return portJSON{p.Name, each(p.DTypes, tensor.DataType.String), each(p.Shape, func(n int64) any {
		if word, special := dimWords[n]; special {
			return word
		}
		return n
	}), p.Whole}
}

func portText(ports []portJSON) string {
	return strings.Join(each(ports, func(p portJSON) string {
		dims := each(p.Shape, func(n any) string { return fmt.Sprint(cmp.Or(n, any("?"))) })
		types := cmp.Or(strings.Join(p.DTypes, "|"), "any")
		return fmt.Sprintf("%s:%s[%s]", plain(p.Name), types, strings.Join(dims, " "))
	}), ", ")
}

func infoCommand() *cobra.Command {
	var failed bool
	var call string
	c := asking(&cobra.Command{
		Use:   "info",
		Short: "show limits and counters of a server, or why calls failed",
		Long: `Info shows the limits and counters of a server and the state of its models.

With --failures, it shows why the last calls failed whose callers were not told, the
newest first. A server that identifies its clients shows each its own. Another one
shows them on its own machine only, but anybody can ask for one --call.`,
		Example: `  tensorferry info
  tensorferry info --failures
  tensorferry info --call 0199a3a87c517cc28a3f5c0d9f1b2e4d`,
		Args: takes(0),
	}, func(ctx context.Context, cl *client.Client, args []string, out printer) error {
		if failed || call != "" {
			return whyFailed(ctx, cl, call, out)
		}
		return info(ctx, cl, args, out)
	})
	c.Flags().BoolVar(&failed, "failures", false, "show why calls failed")
	c.Flags().StringVar(&call, "call", "", "show why the call with this `id` failed")
	return c
}

type failureJSON struct {
	Call   string    `json:"call"`
	Model  string    `json:"model"`
	Code   string    `json:"code"`
	Cause  string    `json:"cause"`
	Failed time.Time `json:"failed"`
}

func whyFailed(ctx context.Context, cl *client.Client, call string, out printer) (err error) {
	var list []client.Failure
	if call == "" {
		list, err = cl.Failures(ctx)
	} else {
		id, bad := uuid.Parse(call)
		if bad != nil {
			return usage("--call %q is not the id of a call, such as 0199a3a87c517cc28a3f5c0d9f1b2e4d", call)
		}
		list = make([]client.Failure, 1)
		if list[0], err = cl.FailureOf(ctx, tensor.ID(id)); status.Code(err) == codes.NotFound {
			err = hinted{err, "tensorferry info --failures" + atServer + " lists the last ones"}
		}
	}
	if err != nil {
		return err
	}
	said := each(list, func(f client.Failure) failureJSON {
		return failureJSON{f.Call.String(), f.Model, f.Code.String(), f.Cause, f.Failed.UTC()}
	})
	return out.print(said, func(w io.Writer) {
		fmt.Fprintln(w, "CALL\tFAILED\tMODEL\tCODE\tCAUSE")
		for _, f := range said {
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", f.Call, f.Failed.Local().Format(time.DateTime), plain(f.Model), f.Code, plain(f.Cause))
		}
	})
}

func info(ctx context.Context, cl *client.Client, _ []string, out printer) error {
	known, err := cl.Info(ctx)
	if err != nil {
		return err
	}
	i := infoJSON{known.Version, known.Uptime.Milliseconds(), append([]string{codec.None.String()}, each(known.Codecs, codec.Codec.String)...), known.Limits, known.Counters, known.Models}
	return out.print(i, func(w io.Writer) {
		fmt.Fprintf(w, "version\t%s\nuptime\t%v\ncodecs\t%s\n",
			plain(i.Version), known.Uptime, strings.Join(i.Codecs, " "))
		writeNumbers(w, "limits", i.Limits)
		writeNumbers(w, "counters", i.Counters)
		fmt.Fprintln(w, "\nmodels")
		for _, m := range i.Models {
			fmt.Fprintf(w, "  %s\t%s\t\n", plain(m.Name), cmp.Or(plain(m.Unavailable), "serving"))
			for _, k := range slices.Sorted(maps.Keys(m.Gauges)) {
				v := m.Gauges[k]
				fmt.Fprintf(w, "  %s %s\t%s\t%s\n", plain(m.Name), plain(k), strconv.FormatFloat(v, 'f', -1, 64), quantity(k, int64(v)))
			}
		}
	})
}

func writeNumbers(w io.Writer, title string, numbers map[string]int64) {
	fmt.Fprintf(w, "\n%s\n", title)
	for _, name := range slices.Sorted(maps.Keys(numbers)) {
		if n := numbers[name]; n == math.MaxInt64 {
			fmt.Fprintf(w, "  %s\tnone\t\n", plain(name))
		} else {
			fmt.Fprintf(w, "  %s\t%d\t%s\n", plain(name), n, quantity(name, n))
		}
	}
}

// quantity formats a value in a readable unit, if its name says which unit it has.
func quantity(name string, n int64) string {
	switch name = strings.TrimSuffix(name, "_total"); {
	case strings.HasSuffix(name, "_bytes") && n >= 1024:
		return sizeText(n)
	case strings.HasSuffix(name, "_millis"):
		return (time.Duration(n) * time.Millisecond).String()
	}
	return ""
}

type infoJSON struct {
	Version      string              `json:"version"`
	UptimeMillis int64               `json:"uptime_millis"`
	Codecs       []string            `json:"codecs"`
	Limits       map[string]int64    `json:"limits"`
	Counters     map[string]int64    `json:"counters"`
	Models       []client.ModelState `json:"models"`
}
