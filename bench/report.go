package main

import (
	"bytes"
	"fmt"
	"runtime/debug"

	"github.com/tensorferry/tensorferry/internal/bench"
)

// Report is everything that was measured, and where.
type Report struct {
	bench.Report
	// LoadAfter is the machine's load at the end, which our own work is a part of.
	LoadAfter string   `json:"load_after,omitempty"`
	Date      string   `json:"date"`    // of the run, as in 2006-01-02
	Modules   []string `json:"modules"` // of the peers, as in path@version
	Batches   []Batch  `json:"flight_batches"`
}

// Batch is Flight with one batch size.
type Batch struct {
	Op    bench.Op `json:"op"`
	Kind  string   `json:"kind"`
	Sums  bool     `json:"checksums"`
	Bytes int      `json:"bytes"`
	Rate  float64  `json:"gb_per_second"`
	Best  bool     `json:"best"` // of those with checksums, or of those without
}

// peerModules returns the modules that peers come from; none where the build does
// not say.
func peerModules() (all []string) {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range info.Deps {
			if m.Path == "github.com/apache/arrow-go/v18" || m.Path == "google.golang.org/grpc" {
				all = append(all, m.Path+"@"+m.Version)
			}
		}
	}
	return all
}

// page is for people, as Markdown.
func (r *Report) page() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "<!-- written by: make bench-peers-results -->\n\n%s · load %s at the end", r.Date, r.LoadAfter)
	for _, m := range r.Modules {
		fmt.Fprintf(&b, " · %s", m)
	}
	fmt.Fprint(&b, "\n\n```\n")
	_ = r.WriteText(&b) // a buffer takes it
	fmt.Fprint(&b, "```\n\nEach client and each server is a process of its own. Arrow Flight is measured with the best of its batch sizes:\n\n| | batch | GB/s | best |\n|---|--:|--:|---|\n")
	for _, x := range r.Batches {
		sums, best := "no checksum", ""
		if x.Sums {
			sums = "CRC-32C"
		}
		if x.Best {
			best = "best"
		}
		fmt.Fprintf(&b, "| %s, %s | %s | %.2f | %s |\n", x.Op, sums, bench.ByteText(x.Bytes), x.Rate, best)
	}
	return b.Bytes()
}
