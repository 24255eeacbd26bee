package looking

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
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/cli/moving"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/tensor"
)

// Models prints the models of a server.
func Models(ctx context.Context, cl *client.Client, _ []string, out display.Printer) error {
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
	listed := display.Each(list, func(m client.Model) modelJSON {
		rows := cmp.Or(rowsWords[m.Rows], strconv.Itoa(m.Rows))
		return modelJSON{m.Name, m.Version, m.Device, display.Each(m.Inputs, portOf), display.Each(m.Outputs, portOf), rows, m.Params, m.Idempotent, training[m.Name], m.About}
	})
	return out.Print(listed, func(w io.Writer) {
		fmt.Fprintln(w, "NAME\tVERSION\tDEVICE\tINPUTS\tRESULTS\tPARAMS")
		for _, m := range listed {
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", display.Plain(m.Name), display.Plain(m.Version), display.Plain(m.Device), portText(m.Inputs), portText(m.Outputs), paramText(m.Params))
		}
		for _, m := range listed {
			if m.Training {
				fmt.Fprintf(w, "\n%s: a client trains it\n", display.Plain(m.Name))
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
	return strings.Join(display.Each(params, func(p client.Param) string {
		return display.Plain(p.Name + "=" + cmp.Or(p.Default, "<"+p.Kind+">"))
	}), " ")
}

type portJSON struct {
	Name     string   `json:"name"`
	DTypes   []string `json:"dtypes,omitempty"` // absent: any
	Shape    []any    `json:"shape"`            // numbers, null, "..."
	Whole    bool     `json:"whole,omitempty"`
	Optional bool     `json:"optional,omitempty"`
}

// What models --json prints for the numbers of rows and of a shape that are not counts.
var (
	rowsWords = map[int]string{engine.AllAxes: "all", engine.AllButLast: "all_but_last"}
	dimWords  = map[int64]any{engine.AnyAxes: "...", engine.Free: nil}
)

func portOf(p client.Port) portJSON {
	return portJSON{p.Name, display.Each(p.DTypes, tensor.DataType.String), display.Each(p.Shape, func(n int64) any {
		if word, special := dimWords[n]; special {
			return word
		}
		return n
	}), p.Whole, p.Optional}
}

func portText(ports []portJSON) string {
	return strings.Join(display.Each(ports, func(p portJSON) string {
		dims := display.Each(p.Shape, func(n any) string { return fmt.Sprint(cmp.Or(n, any("?"))) })
		types := cmp.Or(strings.Join(p.DTypes, "|"), "any")
		if p.Optional {
			p.Name += "?"
		}
		return fmt.Sprintf("%s:%s[%s]", display.Plain(p.Name), types, strings.Join(dims, " "))
	}), ", ")
}

type failureJSON struct {
	Call   string    `json:"call"`
	Model  string    `json:"model"`
	Code   string    `json:"code"`
	Cause  string    `json:"cause"`
	Failed time.Time `json:"failed"`
}

// Failures prints why the last calls failed, or only the one call.
func Failures(ctx context.Context, cl *client.Client, call string, out display.Printer) (err error) {
	var list []client.Failure
	if call == "" {
		list, err = cl.Failures(ctx)
	} else {
		id, bad := uuid.Parse(call)
		if bad != nil {
			return fail.Usage("--call %q is not the id of a call, such as 0199a3a87c517cc28a3f5c0d9f1b2e4d", call)
		}
		list = make([]client.Failure, 1)
		if list[0], err = cl.FailureOf(ctx, tensor.ID(id)); status.Code(err) == codes.NotFound {
			err = fail.Hinted(err, "tensorferry info --failures"+reason.Asked+" lists the last ones")
		}
	}
	if err != nil {
		return err
	}
	said := display.Each(list, func(f client.Failure) failureJSON {
		return failureJSON{f.Call.String(), f.Model, f.Code.String(), f.Cause, f.Failed.UTC()}
	})
	return out.Print(said, func(w io.Writer) {
		fmt.Fprintln(w, "CALL\tFAILED\tMODEL\tCODE\tCAUSE")
		for _, f := range said {
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", f.Call, f.Failed.Local().Format(time.DateTime), display.Plain(f.Model), f.Code, display.Plain(f.Cause))
		}
	})
}

// Info prints the limits and counters of a server, and the state of its models.
func Info(ctx context.Context, cl *client.Client, _ []string, out display.Printer) error {
	known, err := cl.Info(ctx)
	if err != nil {
		return err
	}
	i := infoJSON{known.Version, known.Uptime.Milliseconds(), append([]string{codec.None.String()}, display.Each(known.Codecs, codec.Codec.String)...), known.Limits, known.Counters, known.Models}
	return out.Print(i, func(w io.Writer) {
		fmt.Fprintf(w, "version\t%s\nuptime\t%v\ncodecs\t%s\n",
			display.Plain(i.Version), known.Uptime, strings.Join(i.Codecs, " "))
		writeNumbers(w, "limits", i.Limits)
		writeNumbers(w, "counters", i.Counters)
		fmt.Fprintln(w, "\nmodels")
		for _, m := range i.Models {
			fmt.Fprintf(w, "  %s\t%s\t\n", display.Plain(m.Name), cmp.Or(display.Plain(m.Unavailable), "serving"))
			for _, k := range slices.Sorted(maps.Keys(m.Gauges)) {
				v := m.Gauges[k]
				fmt.Fprintf(w, "  %s %s\t%s\t%s\n", display.Plain(m.Name), display.Plain(k), strconv.FormatFloat(v, 'f', -1, 64), quantity(k, int64(v)))
			}
		}
	})
}

func writeNumbers(w io.Writer, title string, numbers map[string]int64) {
	fmt.Fprintf(w, "\n%s\n", title)
	for _, name := range slices.Sorted(maps.Keys(numbers)) {
		if n := numbers[name]; n == math.MaxInt64 {
			fmt.Fprintf(w, "  %s\tnone\t\n", display.Plain(name))
		} else {
			fmt.Fprintf(w, "  %s\t%d\t%s\n", display.Plain(name), n, quantity(name, n))
		}
	}
}

// quantity formats a value in a readable unit, if its name says which unit it has.
func quantity(name string, n int64) string {
	switch name = strings.TrimSuffix(name, "_total"); {
	case strings.HasSuffix(name, "_bytes") && n >= 1024:
		return display.Size(n)
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

// List prints the tensors of a server that names match; without names, all, and its sources.
func List(ctx context.Context, cl *client.Client, names []string, out display.Printer) (err error) {
	var list []client.Stored
	var sources []string
	if len(names) > 0 {
		list, err = moving.StoredOf(ctx, cl, names)
	} else {
		list, sources, err = cl.List(ctx, "")
	}
	if err != nil {
		return err
	}
	listed := display.Each(moving.StoredJSONs(list), func(j moving.StoredJSON) any { return j })
	for _, s := range sources {
		listed = append(listed, map[string]any{"name": s, "source": true})
	}
	return out.Print(listed, func(w io.Writer) {
		fmt.Fprintln(w, "NAME\tTENSOR\tSIZE\tSTORED\tWHERE")
		for _, s := range list {
			where := cmp.Or(display.Plain(s.File), map[bool]string{true: "disk"}[s.Durable], "memory")
			fmt.Fprintf(w, "%s\t%v\t%s\t%s\t%s\n", display.Plain(s.Name), s.Desc, display.Size(s.Bytes), s.Stored.Local().Format(time.DateTime), where)
		}
		for _, s := range sources {
			fmt.Fprintf(w, "%s\t\t\t\tsource\n", display.Plain(s))
		}
	})
}
