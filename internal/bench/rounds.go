package bench

import (
	"context"
	"fmt"
	"slices"
)

// Peer is one of those that do a work in turns.
type Peer struct {
	Name string
	Do   func(context.Context) (Sample, error)
	// AtLeast is the ratio required of ours to it; 0 requires nothing.
	AtLeast float64
}

// Rounds has ours and every peer do a work on size bytes once in each round, and
// compares ours with each of the others by the ratios within a round. There are
// c.MinPairs rounds, and more, up to c.MaxPairs, until every median is known to
// StableError. Each round runs in the order opposite to the one before; a first
// one is not counted.
func (c Config) Rounds(ctx context.Context, network, work string, size int, ours Peer, peers ...Peer) ([]*Comparison, error) {
	all := make([]*Comparison, len(peers))
	for i, p := range peers {
		all[i] = &Comparison{Net: network, Work: work, Peer: p.Name, Bytes: size}
	}
	everyone := append([]Peer{ours}, peers...)
	order := make([]int, len(everyone))
	for i := range order {
		order[i] = i
	}
	samples := make([]Sample, len(everyone))
	for n, more := 0, true; more; n++ {
		c.tell("%s, %s, round %d", network, work, n)
		for _, i := range order {
			var err error
			if samples[i], err = everyone[i].Do(ctx); err != nil {
				return nil, fmt.Errorf("%s %s: %w", everyone[i].Name, work, err)
			}
		}
		slices.Reverse(order)
		if n == 0 { // it touches pages and opens windows
			continue
		}
		more = n < c.MinPairs
		for i, x := range all {
			x.Pairs = append(x.Pairs, Pair{Ours: samples[0], Theirs: samples[i+1]})
			x.Ratio = spread(x.ratios())
			more = more || n < c.MaxPairs && x.Ratio.Error > StableError
		}
	}
	for i, p := range peers {
		x := all[i]
		x.sum()
		if p.AtLeast > 0 && !c.Smoke {
			x.Required = hold(Required{Value: p.AtLeast}, x.Ratio.Median)
		}
	}
	return all, nil
}
