//go:build linux

package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/internal/roads"
)

// watch is what was seen of a road while a job ran.
type watch struct {
	times []time.Time
	bytes [2][]int64        // that had arrived of what each end sent, at those times
	late  time.Duration     // that a packet was delivered after its time, at most
	found [2]map[string]int // congestion controls of each end, with the most connections at a time
}

// see watches a road while do runs.
func see(ctx context.Context, r *roads.Road, do func() error) (*watch, error) {
	w := &watch{found: [2]map[string]int{{}, {}}}
	w.count(r)
	done := make(chan error, 1)
	go func() { done <- do() }()
	tick := time.NewTicker(sampleEvery)
	defer tick.Stop()
	for i := 0; ; i++ {
		select {
		case err := <-done:
			w.count(r)
			return w, err
		case <-tick.C:
			w.count(r)
			if i%askEvery == askEvery/4 {
				w.ask(ctx, r)
			}
		}
	}
}

func (w *watch) count(r *roads.Road) {
	w.times = append(w.times, time.Now())
	for i := range r.Ends {
		c := r.Counts(i)
		w.bytes[i], w.late = append(w.bytes[i], c.Bytes), max(w.late, c.Late)
	}
}

// ask reads the congestion controls back. Nobody is there before the first connection, and
// what ends meanwhile is not missed.
func (w *watch) ask(ctx context.Context, r *roads.Road) {
	for i, e := range r.Ends {
		found, err := e.Congestion(ctx)
		if err != nil {
			continue
		}
		for name, n := range found {
			w.found[i][name] = max(w.found[i][name], n)
		}
	}
}

// begin returns when the first packet arrived.
func (w *watch) begin() time.Time {
	for i, t := range w.times {
		if w.bytes[0][i] > w.bytes[0][0] || w.bytes[1][i] > w.bytes[1][0] {
			return t
		}
	}
	return w.times[0]
}

// rate returns the rate, in bits per second, of a payload of size bytes that an end sent
// from the first packet on for as long as it took, without the first seconds. Headers and
// what was sent again are spread over it evenly.
func (w *watch) rate(end int, size int64, took time.Duration) float64 {
	all := w.bytes[end]
	first, last := all[0], all[len(all)-1]
	begin := w.begin()
	skip := warmUp
	if took < 2*warmUp {
		skip = 0
	}
	at := slices.IndexFunc(w.times, func(t time.Time) bool { return t.Sub(begin) >= skip })
	if last == first || at < 0 {
		return 0
	}
	part := float64(last-all[at]) / float64(last-first)
	return part * float64(size) * 8 / (took - w.times[at].Sub(begin)).Seconds()
}

// congestion says which congestion controls were read back, as in "cubic ×2". Ends that
// differ are told apart.
func (w *watch) congestion() string {
	var ends [2]string
	for i, found := range w.found {
		var all []string
		for _, name := range slices.Sorted(maps.Keys(found)) {
			all = append(all, fmt.Sprintf("%s ×%d", name, found[name]))
		}
		if ends[i] = strings.Join(all, ", "); len(all) == 0 {
			ends[i] = "not seen"
		}
	}
	if ends[0] == ends[1] {
		return ends[0]
	}
	return ends[0] + " | " + ends[1]
}
