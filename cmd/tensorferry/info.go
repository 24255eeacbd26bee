package main

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/tensor"
)

func modelsCommand() *cobra.Command {
	var server string
	var asJSON bool
	c := &cobra.Command{
		Use:   "models",
		Short: "list the models of a server",
		Long: `Models lists what a server can run: the inputs and results of each model, with
their data types and shapes. In a shape ? is a dimension of any size, and ... any
number of dimensions before the others.

With --json a dimension is a number, null when it may have any size, or "..." for
any number of dimensions; only the first one is ever that. Data types are absent
where any will do. The rows of a model are a string: how many leading axes of a
tensor are independent of each other, "all_but_last" or "all"; "0" needs all of
the tensor at once. An input that is whole is needed whole before the first row.
Params are what run --param takes, with what stands for an absent one.`,
		Example: `  tensorferry models
  tensorferry models --json`,
		Args: takes(0),
		RunE: func(c *cobra.Command, _ []string) error {
			cl, err := dial(server, codec.None.String())
			if err != nil {
				return err
			}
			defer cl.Close()
			models, err := cl.Models(c.Context())
			if err != nil {
				return err
			}
			if asJSON {
				listed := make([]modelJSON, len(models))
				for i, m := range models {
					listed[i] = modelJSON{m.GetName(), m.GetVersion(), m.GetDevice(), portsJSON(m.GetInputs()), portsJSON(m.GetOutputs()), rowsText(m.GetRows()), paramsJSON(m.GetParams()), m.GetAbout()}
				}
				return writeJSON(c.OutOrStdout(), listed)
			}
			w := tabwriter.NewWriter(c.OutOrStdout(), 0, 4, 2, ' ', 0)
			fmt.Fprintln(w, "NAME\tVERSION\tDEVICE\tINPUTS\tRESULTS\tPARAMS")
			for _, m := range models {
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n",
					plain(m.GetName()), plain(m.GetVersion()), plain(m.GetDevice()), portText(m.GetInputs()), portText(m.GetOutputs()), paramText(m.GetParams()))
			}
			return w.Flush()
		},
	}
	serverFlag(c, &server)
	jsonFlag(c, &asJSON)
	return c
}

// modelJSON is a model as models --json prints it.
type modelJSON struct {
	Name    string            `json:"name"`
	Version string            `json:"version,omitempty"`
	Device  string            `json:"device,omitempty"`
	Inputs  []portJSON        `json:"inputs"`
	Outputs []portJSON        `json:"outputs"`
	Rows    string            `json:"rows"`
	Params  []paramJSON       `json:"params,omitempty"`
	About   map[string]string `json:"about,omitempty"`
}

type paramJSON struct {
	Name    string `json:"name"`
	Kind    string `json:"kind,omitempty"`
	Default string `json:"default,omitempty"`
	Meaning string `json:"meaning,omitempty"`
}

func paramsJSON(params []*pb.Param) (listed []paramJSON) {
	for _, p := range params {
		listed = append(listed, paramJSON{p.GetName(), p.GetKind(), p.GetDefault(), p.GetMeaning()})
	}
	return listed
}

func paramText(params []*pb.Param) string {
	var out []string
	for _, p := range params {
		text := plain(p.GetName()) + "=" + plain(p.GetDefault())
		if p.GetDefault() == "" {
			text += "<" + plain(p.GetKind()) + ">"
		}
		out = append(out, text)
	}
	return strings.Join(out, " ")
}

type portJSON struct {
	Name   string   `json:"name"`
	DTypes []string `json:"dtypes,omitempty"` // absent: any
	Shape  []any    `json:"shape"`            // numbers, null, "..."
	Whole  bool     `json:"whole,omitempty"`
}

// rowsText names what engine.Info has as a number from the end of the shape.
func rowsText(rows int32) string {
	switch rows {
	case engine.AllAxes:
		return "all"
	case engine.AllButLast:
		return "all_but_last"
	}
	return strconv.Itoa(int(rows))
}

// shapeJSON says in JSON what engine.Port has as negative numbers.
func shapeJSON(shape []int64) []any {
	dims := make([]any, len(shape))
	for i, n := range shape {
		switch n {
		case engine.AnyAxes:
			dims[i] = "..."
		case engine.Free: // null
		default:
			dims[i] = n
		}
	}
	return dims
}

func portsJSON(ports []*pb.Port) []portJSON {
	listed := make([]portJSON, len(ports))
	for i, p := range ports {
		listed[i] = portJSON{p.GetName(), typeNames(p), shapeJSON(p.GetShape()), p.GetWhole()}
	}
	return listed
}

func typeNames(p *pb.Port) []string {
	var names []string
	for _, d := range p.GetDtypes() {
		name := fmt.Sprintf("DataType(%d)", d) // not that of what is left of a number in 8 bits
		if own := tensor.DataType(d); pb.DataType(own) == d {
			name = own.String()
		}
		names = append(names, name)
	}
	return names
}

func portText(ports []*pb.Port) string {
	var out []string
	for _, p := range ports {
		text := plain(p.GetName())
		types := typeNames(p)
		text += ":" + strings.Join(types, "|")
		if len(types) == 0 {
			text += "any"
		}
		var dims []string
		for _, n := range p.GetShape() {
			switch n {
			case engine.AnyAxes:
				dims = append(dims, "...")
			case engine.Free:
				dims = append(dims, "?")
			default:
				dims = append(dims, fmt.Sprint(n))
			}
		}
		out = append(out, text+"["+strings.Join(dims, " ")+"]")
	}
	return strings.Join(out, ", ")
}

func infoCommand() *cobra.Command {
	var server string
	var asJSON bool
	c := &cobra.Command{
		Use: "info", Short: "show limits and counters of a server", Args: takes(0),
		RunE: func(c *cobra.Command, _ []string) error {
			cl, err := dial(server, codec.None.String())
			if err != nil {
				return err
			}
			defer cl.Close()
			info, err := cl.Info(c.Context())
			if err != nil {
				return err
			}
			if asJSON {
				return writeJSON(c.OutOrStdout(), infoJSON{
					info.GetVersion(), info.GetUptimeMillis(), codecNames(info.GetCodecs()), info.GetLimits(), info.GetCounters(), modelStates(info.GetModels()),
				})
			}
			w := tabwriter.NewWriter(c.OutOrStdout(), 0, 4, 2, ' ', 0)
			fmt.Fprintf(w, "version\t%s\nuptime\t%v\ncodecs\t%s\n",
				plain(info.GetVersion()), time.Duration(info.GetUptimeMillis())*time.Millisecond, strings.Join(codecNames(info.GetCodecs()), " "))
			for _, group := range []struct {
				name   string
				values map[string]int64
			}{{"limits", info.GetLimits()}, {"counters", info.GetCounters()}} {
				fmt.Fprintf(w, "\n%s\n", group.name)
				for _, k := range slices.Sorted(maps.Keys(group.values)) {
					n := group.values[k]
					if n == math.MaxInt64 {
						fmt.Fprintf(w, "  %s\tnone\t\n", plain(k))
						continue
					}
					fmt.Fprintf(w, "  %s\t%d\t%s\n", plain(k), n, quantity(k, n))
				}
			}
			fmt.Fprintln(w, "\nmodels")
			for _, m := range info.GetModels() {
				fmt.Fprintf(w, "  %s\t%s\t\n", plain(m.GetName()), cmp.Or(plain(m.GetUnavailable()), "serves"))
				for _, k := range slices.Sorted(maps.Keys(m.GetGauges())) {
					fmt.Fprintf(w, "  %s %s\t%v\t\n", plain(m.GetName()), plain(k), m.GetGauges()[k])
				}
			}
			return w.Flush()
		},
	}
	serverFlag(c, &server)
	jsonFlag(c, &asJSON)
	return c
}

// quantity is a value in larger units, if its name says which unit it is in.
func quantity(name string, n int64) string {
	switch name = strings.TrimSuffix(name, "_total"); {
	case strings.HasSuffix(name, "_bytes") && n >= 1024:
		return sizeText(n)
	case strings.HasSuffix(name, "_millis"):
		return (time.Duration(n) * time.Millisecond).String()
	}
	return ""
}

// infoJSON is a server as info --json prints it.
type infoJSON struct {
	Version      string           `json:"version"`
	UptimeMillis int64            `json:"uptime_millis"`
	Codecs       []string         `json:"codecs"`
	Limits       map[string]int64 `json:"limits"`
	Counters     map[string]int64 `json:"counters"`
	Models       []stateJSON      `json:"models"`
}

// stateJSON is how a model is.
type stateJSON struct {
	Name        string             `json:"name"`
	Unavailable string             `json:"unavailable,omitempty"`
	Gauges      map[string]float64 `json:"gauges,omitempty"`
}

func modelStates(models []*pb.ModelState) []stateJSON {
	states := make([]stateJSON, len(models))
	for i, m := range models {
		states[i] = stateJSON{m.GetName(), m.GetUnavailable(), m.GetGauges()}
	}
	return states
}

// codecNames names the codecs that a server decodes.
func codecNames(list []pb.Codec) []string {
	names := []string{codec.None.String()}
	for _, k := range list {
		name := fmt.Sprintf("codec %d", k)
		if own := codec.Codec(k); pb.Codec(own) == k {
			name = own.String()
		}
		names = append(names, name)
	}
	return names
}
