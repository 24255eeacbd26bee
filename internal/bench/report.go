package bench

import (
	"fmt"
	"io"
	"text/tabwriter"
	"time"
)

// PeerTexts says what each peer is.
var PeerTexts = map[string]string{
	"raw-crc":        "raw socket, CRC-32C",
	"raw":            "raw socket, unchecked",
	"grpc":           "gRPC, stock codec",
	"grpc-raw-codec": "gRPC, bytes passed through",
	"cp":             "cp and fsync",

	"flight-256KiB":      "Arrow Flight, batches of 256 KiB",
	"flight-1024KiB":     "Arrow Flight, batches of 1 MiB",
	"flight-4096KiB":     "Arrow Flight, batches of 4 MiB",
	"flight-crc-256KiB":  "Arrow Flight, CRC-32C, batches of 256 KiB",
	"flight-crc-1024KiB": "Arrow Flight, CRC-32C, batches of 1 MiB",
	"flight-crc-4096KiB": "Arrow Flight, CRC-32C, batches of 4 MiB",
}

// benchmarks names works as Go names benchmarks.
var benchmarks = map[string]string{
	string(Upload): "Upload", string(Echo): "Echo", string(ReLU): "ReLU",
	call: "Call", pull: "Pull", pullToFile: "PullToFile", push: "Push", pushToMemory: "PushToMemory",
}

// WriteText writes a table for people.
func (r *Report) WriteText(w io.Writer) error {
	fmt.Fprintln(w, r.Machine)
	if r.Smoke {
		fmt.Fprintln(w, "SMOKE RUN: sizes and repetitions are too small for the figures to mean anything")
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "NET\tWORK\tOURS\t\tBESIDE\tTHEIRS\t\tRATIO\t\tQUARTILES\tPAIRS\tREQUIRED")
	for _, c := range r.Comparisons {
		ours, oursMore := c.Ours.text(c.Work)
		theirs, theirsMore := c.Theirs.text(c.Work)
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%.2f\t±%.1f %%\t%.2f to %.2f\t%d\t%v\n", c.Net, c.Title(), ours, oursMore,
			PeerTexts[c.Peer], theirs, theirsMore, c.Ratio.Median, 100*c.Ratio.Error, c.Ratio.Q1, c.Ratio.Q3, len(c.Pairs), c.Required)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w)
	for _, f := range r.FirstResults {
		fmt.Fprintf(t, "%s\tfirst result of a relu of %s\t%s of %s\t%.3f of the total\t±%.1f %%\t%.3f to %.3f\t%d calls\t%v\n", f.Net,
			ByteText(f.Bytes), timeText(f.First), timeText(f.Total), f.Ratio.Median, 100*f.Ratio.Error, f.Ratio.Q1, f.Ratio.Q3, f.Ratio.N, f.Required)
	}
	for _, b := range r.Beside {
		fmt.Fprintf(t, "%s\tcall of %s beside an upload of %s\t%s p50\t%s p99\t\t\t%d calls\t\n", b.Net,
			ByteText(SmallBytes), ByteText(b.Bytes), timeText(b.P50), timeText(b.P99), b.Calls)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprint(w, `
A ratio is the median of the ratios of two runs of one round: our rate to theirs or, for
calls, our time to theirs. ± encloses the true median in 95 of 100 runs; half of the pairs
lie between the quartiles. Rates count a tensor's bytes once: an echo moves them both ways.
CPU time is that of both ends together.
`)
	return err
}

// WriteBenchstat writes every sample as a line in the format of Go's benchmarks,
// which benchstat reads: benchstat -col /peer FILE.
func (r *Report) WriteBenchstat(w io.Writer) error {
	fmt.Fprintf(w, "goos: %s\ngoarch: %s\npkg: github.com/tensorferry/tensorferry/internal/bench\ncpu: %s\n",
		r.Machine.OS, r.Machine.Arch, r.Machine.CPU)
	line := func(name, peer, network string, size, n int, took time.Duration, more string) {
		fmt.Fprintf(w, "Benchmark%s/peer=%s/net=%s/bytes=%d-%d\t%d\t%d ns/op\t%s\n", name, peer, network, size, r.Machine.Cores, n, took, more)
	}
	for _, c := range r.Comparisons {
		for _, p := range c.Pairs {
			for peer, s := range map[string]Sample{Tensorferry.Name: p.Ours, c.Peer: p.Theirs} {
				more := fmt.Sprintf("%.2f MB/s", 1000*rate(c.Bytes, s.Time))
				if c.Work == call {
					more = fmt.Sprintf("%d p99-ns/op", s.P99)
				}
				if s.CPU > 0 {
					more += fmt.Sprintf("\t%d cpu-ns/op", s.CPU)
				}
				line(benchmarks[c.Work], peer, c.Net, c.Bytes, 1, s.Time, more)
			}
		}
	}
	for _, b := range r.Beside {
		line("CallBesideUpload", Tensorferry.Name, b.Net, b.Bytes, b.Calls, b.P50, fmt.Sprintf("%d p99-ns/op", b.P99))
	}
	for _, f := range r.FirstResults {
		line("FirstResult", Tensorferry.Name, f.Net, f.Bytes, f.Ratio.N, f.First, fmt.Sprintf("%.4f of-total", f.Ratio.Median))
	}
	_, err := fmt.Fprintln(w)
	return err
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

// Title names the work, as in "upload of 256 MiB".
func (c *Comparison) Title() string { return c.Work + " of " + ByteText(c.Bytes) }

// text returns speed and cost, as they matter for the work.
func (f Figures) text(work string) (speed, more string) {
	if work == call {
		return timeText(f.Time) + " p50", timeText(f.P99) + " p99"
	}
	if f.CPU > 0 {
		more = fmt.Sprintf("%.2f cpu-s/GB", f.CPU)
	}
	return fmt.Sprintf("%.2f GB/s", f.Rate), more
}

// rate is in GB/s, of 10⁹ bytes.
func rate(n int, d time.Duration) float64 { return float64(n) / float64(d.Nanoseconds()) }

// timeText has three digits, more or less.
func timeText(d time.Duration) string {
	unit := time.Microsecond
	for unit < d/100 {
		unit *= 10
	}
	return d.Round(unit / 10).String()
}

// ByteText names a size in the largest unit that divides it.
func ByteText(n int) string {
	for i, unit := range []string{"GiB", "MiB", "KiB"} {
		if size := 1 << (30 - 10*i); n > 0 && n%size == 0 {
			return fmt.Sprintf("%d %s", n/size, unit)
		}
	}
	if n > 0 && n%1000 == 0 {
		return fmt.Sprintf("%d KB", n/1000)
	}
	return fmt.Sprintf("%d bytes", n)
}
