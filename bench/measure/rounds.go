// Package measure has kinds of internal/bench do jobs in turns, each end in a process of
// its own, and reports how they compare. It does not judge: it prints what is required
// beside what was measured.
package measure

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/internal/bench"
)

// Operations that tensorferry has, and some of its peers.
const (
	// FirstResult is a ReLU, of which the time until its first result counts.
	FirstResult bench.Op = "first-result"
	// CallBeside is a batch of calls on a session that carries uploads.
	CallBeside bench.Op = "call-beside-upload"
	// Pull fetches a mapped file into memory, PullToFile into a new file.
	Pull       bench.Op = "pull"
	PullToFile bench.Op = "pull-to-file"
	// Push stores the source in the server's store, in a folder durably.
	Push bench.Op = "push"
	// PushMany stores Many small tensors, PushSet stores them together, PullMany fetches
	// them.
	PushMany bench.Op = "push-many"
	PushSet  bench.Op = "push-set"
	PullMany bench.Op = "pull-many"
	// AtOnce is a batch of calls, many of them at a time over one connection: its time is
	// that of all for each.
	AtOnce bench.Op = "calls-at-once"
)

// batched has the operations that are batches, of so many times as many calls.
var batched = map[bench.Op]int{bench.Call: 1, CallBeside: 1, AtOnce: 8}

// latency has the operations whose time counts, not their rate.
var latency = map[bench.Op]bool{bench.Call: true, FirstResult: true, CallBeside: true}

// Job is an operation, for batches with a number of calls.
type Job struct {
	Op    bench.Op
	Count int
}

// Config says how to measure.
type Config struct {
	Size int // bytes of the large tensors: 8 or more, a multiple of 8
	// A median is taken of MinRounds rounds at least, and of more, up to MaxRounds,
	// until it is known to StableError.
	MinRounds, MaxRounds int
	Batch                int // small calls in a sample
	Rules                []Rule
	Smoke                bool // the figures mean nothing: do not hold them against what is required
	// Progress, if set, is told what is measured next.
	Progress func(text string)
}

// Full measures what the figures are required of: size is 256 MiB there. It takes
// MinRounds rounds at least, or more if asked.
func Full(size, rounds int) Config {
	rounds = max(rounds, bench.MinRounds)
	return Config{Size: size, MinRounds: rounds, MaxRounds: max(rounds, bench.MaxRounds), Batch: bench.CallBatch}
}

// Smoke runs every part once or a little more, in seconds: its figures mean nothing.
func Smoke() Config {
	return Config{Size: 8 << 20, MinRounds: 2, MaxRounds: 2, Batch: 50, Smoke: true}
}

// Group is who does which jobs in turns: the first entrant is compared with each of
// the others.
type Group struct {
	Net      string // "tcp" or "unix"
	Size     int    // bytes of the tensor
	Rounds   int    // so many at most, if set
	Ops      []bench.Op
	Entrants []Entrant
	// Host and Commands, if set, are where ends run that are not on this machine's own
	// network: what servers listen on, and what starts the server and the client.
	Host     string
	Commands [2]Command
	Wait     time.Duration // for one job; zero is jobWait
}

// Command makes a command, as exec.CommandContext does.
type Command = func(ctx context.Context, name string, args ...string) *exec.Cmd

// Pair is two samples of one round.
type Pair struct {
	Ours   bench.Sample `json:"ours"`
	Theirs bench.Sample `json:"theirs"`
}

// Required is a bound on a figure.
type Required struct {
	AtMost bool    `json:"at_most"` // else at least
	Value  float64 `json:"value"`
	Met    bool    `json:"met"`
}

// hold returns r held against a figure; nil requires nothing.
func (r *Required) hold(figure float64) *Required {
	if r == nil {
		return nil
	}
	held := *r
	held.Met = r.AtMost && figure <= r.Value || !r.AtMost && figure >= r.Value
	return &held
}

// Figures sum samples up, each in its median.
type Figures struct {
	Time    time.Duration `json:"time_ns"`
	P99     time.Duration `json:"p99_ns,omitempty"`
	OfTotal float64       `json:"of_total,omitempty"`
	Rate    float64       `json:"gb_per_second"` // of 10⁹ bytes; an echo's count once
	CPU     float64       `json:"cpu_seconds_per_gb,omitempty"`
	Server  int64         `json:"server_peak_bytes,omitempty"` // the most
	Client  int64         `json:"client_peak_bytes,omitempty"`
}

// Comparison is one kind of work done by one entrant and by another, in turns.
type Comparison struct {
	Net    string   `json:"net"`
	Work   bench.Op `json:"work"`
	Bytes  int      `json:"bytes"`
	Who    string   `json:"who"`
	Beside string   `json:"beside,omitempty"` // empty if there is no peer, and so no ratio
	// Ratio is that of each pair: our rate to theirs or, where time counts, our time
	// to theirs.
	Ratio bench.Spread `json:"ratio"`
	// Cost is our CPU time to theirs or, where time counts, our p99.
	Cost         bench.Spread `json:"cost_ratio"`
	Required     *Required    `json:"required,omitempty"`      // of Ratio; of a first result alone, of OfTotal
	RequiredCost *Required    `json:"required_cost,omitempty"` // of Cost
	Ours         Figures      `json:"ours"`
	Theirs       Figures      `json:"theirs"`
	Pairs        []Pair       `json:"pairs"`
}

// Peer is one of those that do a work in turns.
type Peer struct {
	Name string
	Do   func(context.Context) (bench.Sample, error)
}

// Measure has the entrants of g do its jobs.
func (c Config) Measure(ctx context.Context, g Group) (all []*Comparison, err error) {
	if g.Size < 8 || g.Size%8 != 0 {
		return nil, fmt.Errorf("bench: tensors of %d bytes; give 8 or more, a multiple of 8", g.Size)
	}
	running, cancel := context.WithCancel(ctx)
	defer cancel()
	defer func() {
		if ctx.Err() != nil {
			err = context.Cause(ctx) // and not what it broke
		}
	}()
	if g.Rounds > 0 {
		c.MinRounds = min(c.MinRounds, g.Rounds)
		c.MaxRounds = c.MinRounds
	}
	var entered []*Contestant
	defer func() {
		for _, t := range entered {
			err = errors.Join(err, t.Close())
		}
	}()
	for _, e := range g.Entrants {
		t, err := Open(running, g, e)
		if err != nil {
			return nil, err
		}
		entered = append(entered, t)
	}
	for _, op := range g.Ops {
		var peers []Peer
		for i, e := range g.Entrants {
			job := Job{Op: op, Count: c.Batch * batched[op]}
			peers = append(peers, Peer{e.Name(), func(ctx context.Context) (bench.Sample, error) { return entered[i].Do(ctx, job) }})
		}
		part, err := c.Rounds(ctx, Comparison{Net: g.Net, Work: op, Bytes: g.Size}, peers...)
		if err != nil {
			return nil, err
		}
		all = append(all, part...)
	}
	return all, nil
}

// Rounds has the peers do the work of like in turns, and compares the first with each
// of the others by the ratios within a round.
// There are c.MinRounds rounds, and more, up to c.MaxRounds, until every median is
// known to StableError. A first round, which touches pages and opens windows, is not
// counted.
func (c Config) Rounds(ctx context.Context, like Comparison, peers ...Peer) ([]*Comparison, error) {
	like.Who = peers[0].Name
	all := []*Comparison{}
	var names []string
	for _, p := range peers[1:] {
		x := like
		x.Beside = p.Name
		all, names = append(all, &x), append(names, p.Name)
	}
	if len(all) == 0 {
		all = append(all, &like)
	}
	if c.Progress != nil {
		c.Progress(fmt.Sprintf("%s, %s of %s beside %s", like.Net, like.Work, like.Who, strings.Join(names, "; ")))
	}
	samples := make([]bench.Sample, len(peers)+1) // one of nobody
	err := bench.Turns(len(peers), func(i, _ int) (err error) {
		if samples[i], err = peers[i].Do(ctx); err != nil {
			err = fmt.Errorf("%s, %s: %w", peers[i].Name, like.Work, err)
		}
		return err
	}, func(round int) bool {
		more := round < c.MinRounds
		for i, x := range all {
			if round > 0 {
				x.Pairs = append(x.Pairs, Pair{Ours: samples[0], Theirs: samples[i+1]})
				x.Sum()
			}
			unknown := x.Ratio.Error
			if !latency[x.Work] { // a p99 is never known that well
				unknown = max(unknown, x.Cost.Error)
			}
			more = more || round < c.MaxRounds && unknown > bench.StableError
		}
		return more
	})
	if err != nil {
		return nil, err
	}
	for _, x := range all {
		if !c.Smoke {
			c.hold(x)
		}
	}
	return all, nil
}

// Sum makes the figures and ratios of the pairs.
func (x *Comparison) Sum() {
	x.Ours = x.figures(func(p Pair) bench.Sample { return p.Ours })
	if x.Beside == "" {
		return
	}
	x.Theirs = x.figures(func(p Pair) bench.Sample { return p.Theirs })
	var ratios, costs []float64
	for _, p := range x.Pairs {
		over := func(a, b time.Duration) float64 { return float64(a) / float64(b) }
		ratio, cost := over(p.Ours.Time, p.Theirs.Time), over(p.Ours.P99, p.Theirs.P99)
		if !latency[x.Work] {
			ratio, cost = over(p.Theirs.Time, p.Ours.Time), over(p.Ours.CPU, p.Theirs.CPU)
		}
		ratios = append(ratios, ratio)
		if cost > 0 && cost < 1e9 { // there is one, at both
			costs = append(costs, cost)
		}
	}
	x.Ratio = bench.NewSpread(ratios)
	if len(costs) > 0 {
		x.Cost = bench.NewSpread(costs)
	}
}

// figures sums one side up.
func (x *Comparison) figures(side func(Pair) bench.Sample) Figures {
	var times, cpus, p99s []time.Duration
	var totals []float64
	for _, p := range x.Pairs {
		s := side(p)
		times, cpus, p99s = append(times, s.Time), append(cpus, s.CPU), append(p99s, s.P99)
		if s.Total > 0 {
			totals = append(totals, float64(s.Time)/float64(s.Total))
		}
	}
	t := bench.Quantile(times, 0.5)
	f := Figures{Time: t, P99: bench.Quantile(p99s, 0.5), Rate: rate(x.Bytes, t), CPU: bench.Quantile(cpus, 0.5).Seconds() / (float64(x.Bytes) / 1e9)}
	for _, p := range x.Pairs {
		f.Server, f.Client = max(f.Server, side(p).Server), max(f.Client, side(p).Client)
	}
	if len(totals) > 0 {
		f.OfTotal = bench.Quantile(totals, 0.5)
	}
	return f
}

// Rule requires something of the comparisons that it is about: the first that fits
// counts. Beside is how the name begins; empty is nobody.
type Rule struct {
	Net         string
	Work        bench.Op
	Bytes       int // 0 is any size
	Who, Beside string
	Ratio, Cost *Required
}

// hold holds the figures against the rules.
func (c Config) hold(x *Comparison) {
	for _, r := range c.Rules {
		if r.Net == x.Net && r.Work == x.Work && (r.Bytes == 0 || r.Bytes == x.Bytes) && r.Who == x.Who && (r.Beside == "") == (x.Beside == "") && strings.HasPrefix(x.Beside, r.Beside) {
			figure := x.Ratio.Median
			if x.Beside == "" {
				figure = x.Ours.OfTotal
			}
			x.Required, x.RequiredCost = r.Ratio.hold(figure), r.Cost.hold(x.Cost.Median)
			return
		}
	}
}

// Old goes before the names of another commit's entrants.
const Old = "old "

// worse says which ratios are worse than 1 by more than their ±.
func (x *Comparison) worse() (ratio, cost bool) {
	more := func(s bench.Spread) bool { return s.N > 0 && s.Median*(1-s.Error) > 1 }
	if latency[x.Work] {
		return more(x.Ratio), more(x.Cost)
	}
	return x.Ratio.Median*(1+x.Ratio.Error) < 1, more(x.Cost)
}
