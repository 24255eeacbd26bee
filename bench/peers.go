package main

import (
	"context"
	"strconv"

	"github.com/tensorferry/tensorferry/bench/kinds"
	"github.com/tensorferry/tensorferry/bench/measure"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/bench"
)

// language is one that Flight is written in, with the checksum that is fast there.
type language struct {
	name    string
	sum     codec.Checksum
	program func(sums bool, batch int) []string // of its ends, if not this one's
}

// languages are those of Flight that take part: C++ where there is a Python with
// pyarrow and a path to its ends.
func languages(python, ends string) []language {
	all := []language{{"Go", codec.CRC32C, func(bool, int) []string { return nil }}}
	if python != "" {
		all = append(all, language{"C++", codec.CRC32, func(sums bool, batch int) []string {
			return []string{python, ends, measure.EndArgument, map[bool]string{true: "sums", false: "none"}[sums], strconv.Itoa(batch)}
		}})
	}
	return all
}

// entrant is Flight with batches of a size.
func (l language) entrant(sums bool, batch int) measure.Entrant {
	return measure.Entrant{Kind: flightName(l.name, sums, batch), Program: l.program(sums, batch)}
}

// Batch is Flight with one batch size.
type Batch struct {
	Op   bench.Op `json:"op"`
	Kind string   `json:"kind"`
	Rate float64  `json:"gb_per_second"`
	Best bool     `json:"best"` // of those of its language, with or without checksums

	entrant measure.Entrant
	sum     codec.Checksum
}

var both = []bench.Op{bench.Upload, bench.Echo}

// sweep measures Flight with each batch size.
func sweep(ctx context.Context, c measure.Config, ops []bench.Op, all []language) (batches []Batch, err error) {
	for _, l := range all {
		for _, sums := range []bool{false, true} {
			g := measure.Group{Net: "tcp", Size: c.Size, Rounds: sweepRounds, Ops: ops}
			for _, n := range batchSizes {
				g.Entrants = append(g.Entrants, l.entrant(sums, n))
			}
			found, err := c.Measure(ctx, g)
			if err != nil {
				return nil, err
			}
			sum := map[bool]codec.Checksum{true: l.sum}[sums]
			for _, op := range ops {
				at := len(batches)
				add := func(kind string, rate float64) {
					batches = append(batches, Batch{Op: op, Kind: kind, Rate: rate, entrant: g.Entrants[len(batches)-at], sum: sum})
				}
				for _, x := range found {
					if x.Work == op && len(batches) == at {
						add(x.Who, x.Ours.Rate)
					}
					if x.Work == op {
						add(x.Beside, x.Theirs.Rate)
					}
				}
				best := at
				for i := at; i < len(batches); i++ {
					if batches[i].Rate > batches[best].Rate {
						best = i
					}
				}
				batches[best].Best = true
			}
		}
	}
	return batches, nil
}

// peers are what everybody does, Flight with its best batches.
func peers(nets []string, batches []Batch) (groups []measure.Group) {
	add := func(g measure.Group, kind string, others ...measure.Entrant) {
		g.Entrants = append(measure.Beside(kind), others...)
		groups = append(groups, g)
	}
	flights := func(op bench.Op, sum codec.Checksum) (all []measure.Entrant) {
		for _, b := range batches {
			if b.Best && b.Op == op && (b.sum == sum || b.sum == 0) {
				all = append(all, b.entrant)
			}
		}
		return all
	}
	for _, net := range nets {
		for _, op := range both {
			for _, sum := range []codec.Checksum{codec.CRC32C, codec.CRC32} {
				others := measure.Beside(bench.RawName(sum, 1<<20), bench.RawName(sum, 256<<10))
				if sum == codec.CRC32C {
					others = append(others, measure.Beside(bench.RawName(0, 1<<20), bench.StockGRPC)...)
				}
				add(measure.Group{Net: net, Size: tensorBytes, Ops: []bench.Op{op}}, bench.OursWith(sum), append(others, flights(op, sum)...)...)
			}
		}
		add(measure.Group{Net: net, Size: bench.SmallBytes, Ops: []bench.Op{bench.Call}}, kinds.Compute, measure.Beside(kinds.Plain, kinds.Unary, bench.RawName(codec.CRC32C, 1<<20))...)
	}
	return groups
}

// rules add what is required beside Flight.
func rules() []measure.Rule {
	all := kinds.Rules()
	for _, op := range both {
		all = append(all,
			measure.Rule{Net: "tcp", Work: op, Who: bench.OursWith(codec.CRC32C), Beside: "Arrow Flight (Go), CRC-32C", Ratio: &measure.Required{Value: 2}},
			measure.Rule{Net: "tcp", Work: op, Who: bench.OursWith(codec.CRC32C), Beside: "Arrow Flight (C++), unchecked", Ratio: &measure.Required{Value: 1}},
			measure.Rule{Net: "tcp", Work: op, Who: bench.OursWith(codec.CRC32), Beside: "Arrow Flight (C++), unchecked", Ratio: &measure.Required{Value: 1}})
	}
	return all
}

// loads are what ours does with many calls at a time, and an old program's if there
// is one.
func loads(nets []string, old []string) (groups []measure.Group) {
	for _, net := range nets {
		for _, l := range kinds.Loads {
			g := measure.Group{Net: net, Size: tensorBytes, Ops: both, Entrants: measure.Beside(l.Name())}
			if old != nil {
				g.Entrants = append(g.Entrants, measure.Entrant{Kind: l.Name(), Program: old, Prefix: measure.Old})
			}
			groups = append(groups, g)
		}
	}
	return groups
}

// turns are what an old program and this one do.
func turns(nets []string, old []string) (groups []measure.Group) {
	for _, net := range nets {
		add := func(size int, ops []bench.Op, kind string, others ...string) {
			entrants := []measure.Entrant{{Kind: kind}, {Kind: kind, Program: old, Prefix: measure.Old}}
			groups = append(groups, measure.Group{Net: net, Size: size, Ops: ops, Entrants: append(entrants, measure.Beside(others...)...)})
		}
		for _, sum := range []codec.Checksum{codec.CRC32C, codec.CRC32} {
			add(tensorBytes, both, bench.OursWith(sum), bench.RawName(sum, 1<<20), bench.RawName(sum, 256<<10))
			add(tensorBytes, both, bench.OursWith(sum)+kinds.NoLanes)
		}
		add(tensorBytes, []bench.Op{bench.Upload, bench.Echo, bench.ReLU, measure.FirstResult, measure.CallBeside}, bench.Tensorferry)
		for _, size := range []int{512, 8 << 10, bench.SmallBytes} {
			add(size, []bench.Op{bench.Call, measure.AtOnce}, kinds.Compute, kinds.Plain)
		}
		add(bench.SmallBytes, []bench.Op{bench.Call}, bench.Tensorferry)
		add(tensorBytes, []bench.Op{measure.Pull, measure.PullToFile, measure.Push}, kinds.Folder)
		add(tensorBytes, []bench.Op{measure.Push}, kinds.InMemory)
		for _, each := range []int{1 << 10, 64 << 10} {
			add(measure.Many*each, []bench.Op{measure.PushMany, measure.PullMany}, kinds.InMemory)
		}
	}
	return groups
}
