package measure

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/harness"
)

// Report is everything that was measured, and where.
type Report struct {
	Machine harness.Machine `json:"machine"`
	Date    string          `json:"date"` // of the run, as in 2006-01-02
	// LoadAfter is the machine's load at the end, which our own work is a part of.
	LoadAfter   string        `json:"load_after,omitempty"`
	Smoke       bool          `json:"smoke"`
	Busy        bool          `json:"busy,omitempty"` // beside loops of the least priority
	Comparisons []*Comparison `json:"comparisons"`
}

// Run measures one group after the other.
func (c Config) Run(ctx context.Context, groups []Group) (*Report, error) {
	r := &Report{Machine: harness.ThisMachine(), Date: time.Now().Format(time.DateOnly), Smoke: c.Smoke}
	for _, g := range groups {
		g.Size = min(g.Size, c.Size)
		all, err := c.Measure(ctx, g)
		if err != nil {
			return nil, err
		}
		r.Comparisons = append(r.Comparisons, all...)
	}
	r.LoadAfter = harness.ThisMachine().Load
	return r, nil
}

// WriteText writes tables for people.
func (r *Report) WriteText(w io.Writer) error {
	fmt.Fprintf(w, "%s · load %s at the end · %s\n", r.Machine, cmp.Or(r.LoadAfter, "unknown"), r.Date)
	if r.Smoke {
		fmt.Fprintln(w, "SMOKE RUN: sizes and repetitions are too small for the figures to mean anything")
	}
	if r.Busy {
		fmt.Fprintln(w, "every core is busy with a loop of the least priority")
	}
	loaded := func(x *Comparison) bool { return strings.Contains(x.Who, "connections") }
	for _, part := range []struct {
		title string
		has   func(*Comparison) bool
	}{
		{"On this machine", func(x *Comparison) bool { return !loaded(x) }},
		{"The same as many calls at a time, with the most memory that server and client had, without the tensor at the client", loaded},
	} {
		if err := r.write(w, part.title, part.has); err != nil {
			return err
		}
	}
	_, err := fmt.Fprint(w, `
A ratio is the median of the ratios of two runs of one round: our rate to theirs or, for
calls and first results, our time to theirs. COST is the same of the CPU time of both ends
together or, for calls, of the p99. ± encloses the true median in 95 of 100 runs. Rates
count a tensor's bytes once: an echo moves them both ways.
`)
	return err
}

func (r *Report) write(w io.Writer, title string, has func(*Comparison) bool) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	var last Comparison
	worse, olds := 0, 0
	row := func(where, work, who string, f Figures, x *Comparison, rest string) {
		speed, cost := f.text(x.Work, x.Bytes)
		if strings.Contains(who, "connections") {
			cost += fmt.Sprintf("  %d, %d MiB", (f.Server+1<<19)>>20, (f.Client+1<<19)>>20)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n", where, work, who, speed, cost, rest)
	}
	for _, x := range r.Comparisons {
		if !has(x) {
			continue
		}
		if last.Work == "" {
			fmt.Fprintf(t, "\n%s\nNET\tWORK\t\t\t\tRATIO\t\tCOST\t\tROUNDS\tREQUIRED\n", title)
		}
		if last.Net != x.Net || last.Work != x.Work || last.Who != x.Who || x.Beside == "" {
			alone := "\t\t\t\t\t"
			if x.Beside == "" {
				alone = fmt.Sprintf("\t\t\t\t%d\t%v", len(x.Pairs), x.Required)
			}
			row(x.Net, fmt.Sprintf("%s of %s", x.Work, bench.ByteText(x.Bytes)), x.Who, x.Ours, x, alone)
		}
		if last = *x; x.Beside == "" {
			continue
		}
		required := x.Required.String()
		if x.RequiredCost != nil {
			required += ", cost " + x.RequiredCost.String()
		}
		if strings.HasPrefix(x.Beside, Old) {
			var what []string
			slower, dearer := x.worse()
			for i, is := range []bool{slower, dearer} {
				if is {
					what = append(what, []string{"RATIO", "COST"}[i])
				}
			}
			worse, olds = worse+len(what), olds+1+min(x.Cost.N, 1)
			if required = "–"; len(what) > 0 && !r.Smoke {
				required = "WORSE: " + strings.Join(what, ", ")
			}
		}
		row("", "", "  beside "+x.Beside, x.Theirs, x, fmt.Sprintf("%s\t%s\t%d\t%s", x.Ratio, x.Cost, len(x.Pairs), required))
	}
	if olds > 0 {
		fmt.Fprintf(t, "%d of %d ratios to the old program are worse by more than their ±\n", worse, olds)
	}
	return t.Flush()
}

// String returns such as "at least 0.85: met".
func (r *Required) String() string {
	if r == nil {
		return "–"
	}
	bound, met := "at least", "met"
	if r.AtMost {
		bound = "at most"
	}
	if !r.Met {
		met = "MISSED"
	}
	return fmt.Sprintf("%s %g: %s", bound, r.Value, met)
}

// text returns speed and cost, as they matter for the work.
func (f Figures) text(work bench.Op, size int) (speed, cost string) {
	cpu := ""
	if f.CPU > 0 {
		cpu = ", " + bench.TimeText(time.Duration(f.CPU*float64(size))) + " CPU"
	}
	switch {
	case work == FirstResult:
		return bench.TimeText(f.Time), fmt.Sprintf("%.3f of the call", f.OfTotal)
	case latency[work]:
		return bench.TimeText(f.Time) + " p50", bench.TimeText(f.P99) + " p99" + cpu
	case work == AtOnce:
		return fmt.Sprintf("%.0f calls/s", 1/f.Time.Seconds()), strings.TrimPrefix(cpu, ", ")
	case f.CPU > 0:
		cost = fmt.Sprintf("%.2f cpu-s/GB", f.CPU)
	}
	return fmt.Sprintf("%.2f GB/s", f.Rate), cost
}

// rate is in GB/s, of 10⁹ bytes.
func rate(n int, d time.Duration) float64 { return float64(n) / float64(d.Nanoseconds()) }
