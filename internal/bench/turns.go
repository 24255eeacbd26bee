package bench

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// InTurns has all do their part in each round, in the order opposite to that of the
// round before, while more says so of the number of the next, from 0.
func InTurns(more func(round int) bool, all ...func() error) error {
	all = slices.Clone(all)
	for n := 0; more(n); n++ {
		for _, do := range all {
			if err := do(); err != nil {
				return err
			}
		}
		slices.Reverse(all)
	}
	return nil
}

// Peer is one of those that do a work in turns.
type Peer struct {
	Name string
	Do   func(context.Context) (Sample, error)
	// Required is of the ratio of ours to it; the zero value requires nothing.
	Required Required
}

// Rounds has ours and every peer do a work on size bytes in turns, and compares ours
// with each of the others by the ratios within a round. There are c.MinPairs rounds,
// and more, up to c.MaxPairs, until every median is known to StableError. A first
// round, which touches pages and opens windows, is not counted.
func (c Config) Rounds(ctx context.Context, network, work string, size int, ours Peer, peers ...Peer) ([]*Comparison, error) {
	samples := make([]Sample, 1+len(peers))
	var parts []func() error
	for i, p := range append([]Peer{ours}, peers...) {
		parts = append(parts, func() (err error) {
			if samples[i], err = p.Do(ctx); err != nil {
				err = fmt.Errorf("%s %s: %w", p.Name, work, err)
			}
			return err
		})
	}
	var names []string
	all := make([]*Comparison, len(peers))
	for i, p := range peers {
		all[i] = &Comparison{Net: network, Work: work, Peer: p.Name, Bytes: size}
		names = append(names, p.Name)
	}
	c.tell("%s, %s beside %s", network, work, strings.Join(names, " "))
	err := InTurns(func(round int) bool {
		more := round <= c.MinPairs
		for i, x := range all {
			if round > 1 {
				x.Pairs = append(x.Pairs, Pair{Ours: samples[0], Theirs: samples[i+1]})
				x.Ratio = spread(x.ratios())
			}
			more = more || round <= c.MaxPairs && x.Ratio.Error > StableError
		}
		return more
	}, parts...)
	if err != nil {
		return nil, err
	}
	for i, p := range peers {
		all[i].sum()
		if p.Required.Value > 0 && !c.Smoke {
			all[i].Required = hold(p.Required, all[i].Ratio.Median)
		}
	}
	return all, nil
}

// Turns compares an old and a new program that ran in turns by what work cost them:
// times, CPU times, and times relative to a peer's. The zero value has no turns.
type Turns struct {
	figures map[string][]turn
}

// turn is one figure of both programs.
type turn struct{ before, now float64 }

// AddReports adds a turn: the figures that both reports have.
func (t *Turns) AddReports(before, now *Report) { t.add(before.costs(), now.costs()) }

// AddPairs adds each pair of c as a turn, in which theirs is the old program's sample.
func (t *Turns) AddPairs(c *Comparison) {
	for _, p := range c.Pairs {
		one := &Comparison{Net: c.Net, Work: c.Work, Bytes: c.Bytes, Pairs: []Pair{p}}
		one.sum()
		t.add(one.costs(one.Theirs), one.costs(one.Ours))
	}
}

func (t *Turns) add(before, now map[string]float64) {
	if t.figures == nil {
		t.figures = map[string][]turn{}
	}
	for name, b := range before {
		if n := now[name]; b > 0 && n > 0 {
			t.figures[name] = append(t.figures[name], turn{b, n})
		}
	}
}

// WriteText writes a table for people. It marks the figures that became worse by more
// than their ±.
func (t *Turns) WriteText(w io.Writer) error {
	table := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(table, "FIGURE, LESS IS BETTER\tOLD\tNEW\tNEW/OLD\t\tTURNS\t")
	worse := 0
	for _, name := range slices.Sorted(maps.Keys(t.figures)) {
		var before, now, ratios []float64
		for _, x := range t.figures[name] {
			before, now, ratios = append(before, x.before), append(now, x.now), append(ratios, x.now/x.before)
		}
		ratio, mark := spread(ratios), ""
		if ratio.Median*(1-ratio.Error) > 1 {
			worse++
			mark = "WORSE"
		}
		fmt.Fprintf(table, "%s\t%.4g\t%.4g\t%.3f\t±%.1f %%\t%d\t%s\n",
			name, quantile(before, 0.5), quantile(now, 0.5), ratio.Median, 100*ratio.Error, ratio.N, mark)
	}
	fmt.Fprintf(table, "%d of %d figures are worse by more than their ±\n", worse, len(t.figures))
	return table.Flush()
}

// costs returns the figures of a report by name.
func (r *Report) costs() map[string]float64 {
	all, own := map[string]float64{}, map[string]*Comparison{}
	for _, c := range r.Comparisons {
		relative := c.Ratio.Median
		if c.Work != call { // there it is one of rates
			relative = 1 / relative
		}
		name := c.name()
		all[name+", to "+c.Peer] = relative
		if own[name] == nil {
			own[name] = &Comparison{Net: c.Net, Work: c.Work, Bytes: c.Bytes}
		}
		own[name].Pairs = append(own[name].Pairs, c.Pairs...)
	}
	for _, c := range own { // beside all peers
		c.sum()
		maps.Copy(all, c.costs(c.Ours))
	}
	for _, f := range r.FirstResults {
		all[f.Net+" first result, ms"] = millis(f.First)
		all[f.Net+" first result, of the total"] = f.Ratio.Median
	}
	for _, b := range r.Beside {
		all[b.Net+" call beside an upload, ms"] = millis(b.P50)
		all[b.Net+" call beside an upload, p99 ms"] = millis(b.P99)
	}
	return all
}

// costs returns the figures of one side by name.
func (c *Comparison) costs(f Figures) map[string]float64 {
	all := map[string]float64{c.name() + ", ms": millis(f.Time)}
	if c.Work == call {
		all[c.name()+", p99 ms"] = millis(f.P99)
	} else {
		all[c.name()+", CPU s/GB"] = f.CPU
	}
	return all
}

func (c *Comparison) name() string { return c.Net + " " + c.Title() }

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
