//go:build linux

package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/roads"
)

// What a work is measured by.
const (
	sharing = "SHARE\tMBIT/S"
	timing  = "TIME\t"
	calling = "P50\tP99"
)

// table prints what was measured on one line.
type table struct {
	line
	rounds int
	failed int // turns
}

func (t *table) head(part string) {
	fmt.Printf("\n%s: %s, queue %s, MTU %d\n", map[string]string{
		shares: "Share of the line", times: "Times", calls: "Small calls", memory: "Memory",
	}[part], t.line, size(t.queueBytes()), t.mtu)
}

// size names bytes in MB.
func size(n int) string { return fmt.Sprintf("%.3g MB", float64(n)/1e6) }

// measure has everybody do a work in turns, each round in the opposite order, and prints
// medians. The ratio is the median of the first one's to each other's in a round. Who
// fails is left out, and what went wrong is printed.
func (t *table) measure(ctx context.Context, work, by string, turns []turn) error {
	got := make([][]result, len(turns))
	failed := make([]error, len(turns))
	err := bench.Turns(len(turns), func(i, _ int) error {
		if failed[i] != nil {
			return nil
		}
		progress("%s: %s, %s", t.line, work, turns[i].who)
		r, err := turns[i].do(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if failed[i] = err; err == nil {
			got[i] = append(got[i], r)
		}
		return nil
	}, func(round int) bool { return round < t.rounds-1 })
	if err != nil {
		return err
	}
	out := tabwriter.NewWriter(os.Stdout, 0, 4, 2, ' ', 0)
	line := func(cells ...string) { fmt.Fprintln(out, strings.TrimRight(strings.Join(cells, "\t"), "\t")) }
	line("WORK", "WHO", by, "RATIO", "LATE", "CONGESTION")
	for i, turn := range turns {
		if failed[i] != nil {
			t.failed++
			line(work, turn.who, "–", "", "", "", strings.ReplaceAll(failed[i].Error(), "\n", " "))
			continue
		}
		row := []string{work, turn.who}
		value := t.value(by)
		var ratios []float64
		for k := range min(len(got[0]), len(got[i])) {
			ratios = append(ratios, value(got[0][k])/value(got[i][k]))
		}
		median := func(of func(result) float64) float64 {
			var all []float64
			for _, r := range got[i] {
				all = append(all, of(r))
			}
			return bench.Quantile(all, 0.5)
		}
		mid := median(value)
		switch by {
		case sharing:
			row = append(row, fmt.Sprintf("%.3f", mid), fmt.Sprintf("%.1f", mid*float64(t.mbit)))
		case timing:
			row = append(row, (time.Duration(mid)).Round(time.Millisecond).String(), "")
		case calling:
			row = append(row, millis(time.Duration(mid)), millis(time.Duration(median(func(r result) float64 { return float64(r.p99) }))))
		}
		ratio := "–"
		if i > 0 && len(ratios) > 0 {
			ratio = fmt.Sprintf("%.2f", bench.Quantile(ratios, 0.5))
		}
		last, late := got[i][len(got[i])-1], time.Duration(0)
		for _, r := range got[i] {
			late = max(late, r.late)
		}
		line(append(row, ratio, millis(late), last.congestion, last.beside)...)
	}
	return out.Flush()
}

// value returns what is compared. Of two directions it is the slower one.
func (t *table) value(by string) func(result) float64 {
	return func(r result) float64 {
		if by != sharing {
			return float64(r.took)
		}
		rate := min(cmp.Or(r.rates[0], r.rates[1]), cmp.Or(r.rates[1], r.rates[0]))
		return rate / float64(t.bits())
	}
}

// foot prints what has become of the packets.
func (t *table) foot(r *roads.Road) {
	up, down := r.Counts(client), r.Counts(server)
	fmt.Printf("Lost at random %d and %d packets, dropped by the queues %d and %d.\n", up.Lost, down.Lost, up.Dropped, down.Dropped)
}
