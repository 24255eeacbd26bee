package main

import (
	"bytes"
	"fmt"
	"runtime/debug"
	"slices"

	"github.com/tensorferry/tensorferry/internal/bench"
)

// Report is everything that was measured, and where.
type Report struct {
	Machine bench.Machine `json:"machine"`
	// LoadAfter is the machine's load at the end, which our own work is a part of.
	LoadAfter string   `json:"load_after,omitempty"`
	Date      string   `json:"date"`    // of the run, as in 2006-01-02
	Modules   []string `json:"modules"` // of the peers, as in path@version
	Smoke     bool     `json:"smoke"`   // the figures mean nothing
	Bytes     int      `json:"bytes"`   // of the tensor
	Works     []Work   `json:"works"`
}

// Work is one kind of work, done by everyone.
type Work struct {
	Op          bench.Op            `json:"op"`
	Batches     []Batch             `json:"flight_batches"`
	Comparisons []*bench.Comparison `json:"comparisons"`
}

// Batch is Flight with one batch size.
type Batch struct {
	Kind  string  `json:"kind"`
	Sums  bool    `json:"checksums"`
	Bytes int     `json:"bytes"`
	Rate  float64 `json:"gb_per_second"`
	Best  bool    `json:"best"` // of those with checksums, or of those without
}

// best are Flight with its best batch size, without checksums and with.
func (w *Work) best() []Batch {
	return slices.DeleteFunc(slices.Clone(w.Batches), func(b Batch) bool { return !b.Best })
}

// row is one of those who did a work.
type row struct {
	Text    string
	Ours    bool
	Figures bench.Figures
	*bench.Comparison
}

// rows are everyone, ours first.
func (w *Work) rows() []row {
	all := kinds()
	rows := []row{{Text: bench.Tensorferry.Text, Ours: true, Figures: w.Comparisons[0].Ours}}
	for _, c := range w.Comparisons {
		rows = append(rows, row{Text: all[c.Peer].Text, Figures: c.Theirs, Comparison: c})
	}
	return rows
}

// title names the work, as in "upload of 256 MiB".
func (r *Report) title(w Work) string { return string(w.Op) + " of " + bench.ByteText(r.Bytes) }

// peerModules returns the modules that peers come from; none where the build does
// not say.
func peerModules() []string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return nil
	}
	var all []string
	for _, m := range info.Deps {
		if m.Path == "github.com/apache/arrow-go/v18" || m.Path == "google.golang.org/grpc" {
			all = append(all, m.Path+"@"+m.Version)
		}
	}
	return all
}

// markdown is a page for people.
func (r *Report) markdown() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "<!-- written by: make bench-peers-results -->\n\n%s · %s", r.Machine, r.Date)
	if r.LoadAfter != "" {
		fmt.Fprintf(&b, " · load %s at the end", r.LoadAfter)
	}
	for _, m := range r.Modules {
		fmt.Fprintf(&b, " · %s", m)
	}
	fmt.Fprint(&b, "\n")
	if r.Smoke {
		fmt.Fprint(&b, "\n**SMOKE RUN**: sizes and repetitions are too small for the figures to mean anything\n")
	}
	for _, w := range r.Works {
		fmt.Fprintf(&b, "\n| %s | GB/s | CPU s/GB | ratio | ± | quartiles | rounds | required |\n|---|--:|--:|--:|--:|:-:|--:|---|\n", r.title(w))
		for _, x := range w.rows() {
			fmt.Fprintf(&b, "| %s | %.2f | %.2f |", x.Text, x.Figures.Rate, x.Figures.CPU)
			if x.Ours {
				fmt.Fprint(&b, " | | | | |\n")
				continue
			}
			fmt.Fprintf(&b, " %.2f | %.1f %% | %.2f to %.2f | %d | %v |\n",
				x.Ratio.Median, 100*x.Ratio.Error, x.Ratio.Q1, x.Ratio.Q3, x.Ratio.N, x.Required)
		}
	}
	fmt.Fprint(&b, `
A ratio is tensorferry's rate to theirs, above 1 is faster: the median of the ratios within rounds. ± encloses the true median
in 95 of 100 runs; half of the rounds lie between the quartiles. Rates count a tensor's bytes once: an echo moves them both
ways. CPU time is that of the client's process and of the server's.

Arrow Flight is measured with the best of its batch sizes, in GB/s:

`)
	fmt.Fprint(&b, "| |")
	for _, n := range batchSizes {
		fmt.Fprintf(&b, " %s |", bench.ByteText(n))
	}
	fmt.Fprint(&b, "\n|---|")
	for range batchSizes {
		fmt.Fprint(&b, "--:|")
	}
	for _, w := range r.Works {
		for i, x := range w.Batches {
			if i%len(batchSizes) == 0 {
				fmt.Fprintf(&b, "\n| %s, %s |", w.Op, map[bool]string{true: "CRC-32C", false: "no checksum"}[x.Sums])
			}
			format := " %.2f |"
			if x.Best {
				format = " **%.2f** |"
			}
			fmt.Fprintf(&b, format, x.Rate)
		}
	}
	fmt.Fprintln(&b)
	return b.Bytes()
}
