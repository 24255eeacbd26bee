package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/tensorferry/tensorferry/slab"
)

// Config says what to measure. Sizes are in bytes.
type Config struct {
	Networks []string // "tcp", "unix"
	Size     int      // of the large tensors: 8 or more, a multiple of 8
	// A median is taken of MinPairs pairs at least, and of more, up to MaxPairs,
	// until it is known to StableError.
	MinPairs, MaxPairs int
	Batch              int  // small calls in a sample
	Smoke              bool // the figures mean nothing: do not hold them against what is required
	// Progress, if set, is told what is measured next.
	Progress func(text string)
}

// Full measures what the figures are required of: size is 256 MiB there. It takes
// MinPairs pairs at least, or more if asked.
func Full(networks []string, size, pairs int) Config {
	pairs = max(pairs, MinPairs)
	return Config{Networks: networks, Size: size, MinPairs: pairs, MaxPairs: max(pairs, MaxPairs), Batch: PingBatch}
}

// Smoke runs every part once or a little more, in seconds: its figures mean
// nothing.
func Smoke(networks []string) Config {
	return Config{Networks: networks, Size: 8 << 20, MinPairs: 3, MaxPairs: 3, Batch: 50, Smoke: true}
}

// Pair is two samples taken back to back.
type Pair struct {
	Ours   Sample `json:"ours"`
	Theirs Sample `json:"theirs"`
}

// Required is a bound on a figure.
type Required struct {
	AtMost bool    `json:"at_most"` // else at least
	Value  float64 `json:"value"`
	Met    bool    `json:"met"`
}

// hold returns r held against a figure.
func hold(r Required, figure float64) *Required {
	r.Met = r.AtMost && figure <= r.Value || !r.AtMost && figure >= r.Value
	return &r
}

// Figures sum samples up, each in its median.
type Figures struct {
	Time time.Duration `json:"time_ns"`
	P99  time.Duration `json:"p99_ns,omitempty"`
	Rate float64       `json:"gb_per_second"` // of 10⁹ bytes; an echo's count once
	CPU  float64       `json:"cpu_seconds_per_gb,omitempty"`
}

// Comparison is one kind of work done by us and by a peer, in turns.
type Comparison struct {
	Net   string `json:"net"`
	Work  string `json:"work"` // upload, echo, relu, call, pull, pull-to-file, push, push-to-memory
	Peer  string `json:"peer"` // raw-crc, raw, grpc, grpc-raw-codec, cp
	Bytes int    `json:"bytes"`
	// Ratio is that of each pair: our rate to theirs or, for small calls, our time
	// to theirs.
	Ratio    Spread    `json:"ratio"`
	Required *Required `json:"required,omitempty"`
	Ours     Figures   `json:"ours"`
	Theirs   Figures   `json:"theirs"`
	Pairs    []Pair    `json:"pairs"`

	ours, theirs func(context.Context) (Sample, error)
}

// call is the work of small calls.
const call = "call"

// required holds over TCP, by work and peer.
var required = map[[2]string]Required{
	{string(Upload), "raw-crc"}: {Value: uploadToCRC},
	{string(Echo), "raw-crc"}:   {Value: echoToCRC},
	{string(Upload), "grpc"}:    {Value: uploadToStock},
	{string(Echo), "grpc"}:      {Value: echoToStock},
	{call, "grpc"}:              {Value: pingToStock, AtMost: true},
	{pull, "raw-crc"}:           {Value: pullToCRC},
	{push, "cp"}:                {Value: pushToCopy},
}

// FirstResult is how early a relu call of Bytes has something to show.
type FirstResult struct {
	Net      string        `json:"net"`
	Bytes    int           `json:"bytes"`
	First    time.Duration `json:"first_ns"` // medians
	Total    time.Duration `json:"total_ns"`
	Ratio    Spread        `json:"ratio"` // of first to total, call by call
	Required *Required     `json:"required,omitempty"`
}

// Beside is the time of small calls while an upload runs on the same session.
type Beside struct {
	Net   string        `json:"net"`
	Bytes int           `json:"bytes"`
	Calls int           `json:"calls"`
	P50   time.Duration `json:"p50_ns"`
	P99   time.Duration `json:"p99_ns"`
}

// Report is everything that was measured, and where.
type Report struct {
	Machine      Machine       `json:"machine"`
	Smoke        bool          `json:"smoke"`
	Comparisons  []*Comparison `json:"comparisons"`
	FirstResults []FirstResult `json:"first_results"`
	Beside       []Beside      `json:"beside"`
}

// Run measures everything c asks for: tensorferry and its peers take turns. It
// returns when ctx ends, with its cause.
func Run(ctx context.Context, c Config) (*Report, error) {
	if c.Size < 8 || c.Size%8 != 0 {
		return nil, fmt.Errorf("bench: tensors of %d bytes; give 8 or more, a multiple of 8", c.Size)
	}
	// Outside the Go heap, in huge pages where there are any, as the engine's own.
	pool := slab.NewPool(0, slab.System)
	var slabs [3]*slab.Slab
	for i := range slabs {
		var err error
		if slabs[i], err = pool.Get(c.Size); err != nil {
			return nil, fmt.Errorf("bench: %w", err)
		}
		defer slabs[i].Release() // which keeps them alive until then, too
		FillFloats(slabs[i].Bytes())
	}
	m := Memory{Source: slabs[0].Bytes(), Remote: slabs[1].Bytes(), Back: slabs[2].Bytes()}
	r := &Report{Machine: ThisMachine(), Smoke: c.Smoke}
	for _, network := range c.Networks {
		if err := c.network(ctx, r, network, m); err != nil {
			if ctx.Err() != nil {
				err = context.Cause(ctx) // and not what it broke
			}
			return nil, err
		}
	}
	return r, nil
}

// network measures everything over one kind of socket.
func (c Config) network(ctx context.Context, r *Report, network string, m Memory) (err error) {
	ours, err := NewOurs(ctx, network, m)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ours.Close()) }()
	byWork := map[Op][]*Comparison{}
	works := []Op{Upload, Echo, ReLU}
	for _, k := range []Kind{RawCRC, Raw, StockGRPC} {
		b, err := k.Open(ctx, network, m)
		if err != nil {
			return err
		}
		defer func() { _ = b.Close() }() // whatever a cut connection gave the server
		for _, op := range works {
			byWork[op] = append(byWork[op], &Comparison{
				Net: network, Work: string(op), Peer: k.Name, Bytes: len(m.Source),
				ours:   func(ctx context.Context) (Sample, error) { return ours.Move(ctx, op) },
				theirs: func(ctx context.Context) (Sample, error) { return b.Move(ctx, op) },
			})
		}
	}
	for _, op := range works {
		if err := c.compare(ctx, r, byWork[op]...); err != nil {
			return err
		}
	}
	if err := c.firstResult(ctx, r, network, ours); err != nil {
		return err
	}
	if err := c.pings(ctx, r, network, ours); err != nil {
		return err
	}
	c.tell("%s, small calls beside an upload", network)
	s, n, err := ours.PingBeside(ctx, c.Batch)
	if err != nil {
		return err
	}
	r.Beside = append(r.Beside, Beside{Net: network, Bytes: len(m.Source), Calls: n, P50: s.Time, P99: s.P99})
	return c.stored(ctx, r, network, m)
}

// pings measures small calls.
func (c Config) pings(ctx context.Context, r *Report, network string, ours *Ours) error {
	var all []*Comparison
	for _, p := range []struct {
		name string
		open func(network string, size int) (*GRPCPing, error)
	}{{"grpc", NewStockPing}, {"grpc-raw-codec", NewRawPing}} {
		b, err := p.open(network, SmallBytes)
		if err != nil {
			return err
		}
		defer func() { _ = b.Close() }() // whatever a cut connection gave the server
		all = append(all, &Comparison{
			Net: network, Work: call, Peer: p.name, Bytes: SmallBytes,
			ours:   func(ctx context.Context) (Sample, error) { return Batch(ctx, ours.Ping, c.Batch) },
			theirs: func(ctx context.Context) (Sample, error) { return Batch(ctx, b.Ping, c.Batch) },
		})
	}
	return c.compare(ctx, r, all...)
}

// compare adds a pair to each comparison in turn, until the median of its ratios
// is stable. Who of a pair goes first alternates.
func (c Config) compare(ctx context.Context, r *Report, all ...*Comparison) error {
	c.tell("%s, %s", all[0].Net, all[0].Work)
	for _, x := range all { // the first run touches pages and opens windows
		if _, err := x.pair(ctx, true); err != nil {
			return err
		}
	}
	for n, more := 0, true; more; n++ {
		more = false
		for _, x := range all {
			if n >= c.MaxPairs || n >= c.MinPairs && x.Ratio.Error <= StableError {
				continue
			}
			p, err := x.pair(ctx, n%2 == 0)
			if err != nil {
				return err
			}
			more = true
			x.Pairs = append(x.Pairs, p)
			x.Ratio = spread(x.ratios())
		}
	}
	for _, x := range all {
		x.sum()
		if q, ok := required[[2]string{x.Work, x.Peer}]; ok && x.Net == "tcp" && !c.Smoke {
			x.Required = hold(q, x.Ratio.Median)
		}
	}
	r.Comparisons = append(r.Comparisons, all...)
	return nil
}

// pair takes two samples.
func (c *Comparison) pair(ctx context.Context, oursFirst bool) (p Pair, err error) {
	if !oursFirst {
		if p.Theirs, err = c.theirs(ctx); err != nil {
			return p, fmt.Errorf("%s %s: %w", peerTexts[c.Peer], c.Work, err)
		}
	}
	if p.Ours, err = c.ours(ctx); err != nil {
		return p, fmt.Errorf("tensorferry %s: %w", c.Work, err)
	}
	if oursFirst {
		if p.Theirs, err = c.theirs(ctx); err != nil {
			return p, fmt.Errorf("%s %s: %w", peerTexts[c.Peer], c.Work, err)
		}
	}
	return p, nil
}

func (c *Comparison) ratios() []float64 {
	all := make([]float64, len(c.Pairs))
	for i, p := range c.Pairs {
		all[i] = float64(p.Theirs.Time) / float64(p.Ours.Time) // of rates
		if c.Work == call {
			all[i] = 1 / all[i]
		}
	}
	return all
}

// sum sets the figures of both sides.
func (c *Comparison) sum() {
	c.Ours = c.figures(func(p Pair) Sample { return p.Ours })
	c.Theirs = c.figures(func(p Pair) Sample { return p.Theirs })
}

// figures sums one side up.
func (c *Comparison) figures(side func(Pair) Sample) Figures {
	var times, cpus, p99s []time.Duration
	for _, p := range c.Pairs {
		s := side(p)
		times, cpus, p99s = append(times, s.Time), append(cpus, s.CPU), append(p99s, s.P99)
	}
	t := quantile(times, 0.5)
	return Figures{
		Time: t, P99: quantile(p99s, 0.5), Rate: rate(c.Bytes, t),
		CPU: quantile(cpus, 0.5).Seconds() / (float64(c.Bytes) / 1e9),
	}
}

// firstResult measures relu calls until the median is stable.
func (c Config) firstResult(ctx context.Context, r *Report, network string, ours *Ours) error {
	c.tell("%s, first result", network)
	var ratios []float64
	var firsts, totals []time.Duration
	f := FirstResult{Net: network, Bytes: len(ours.source.Data)}
	for n := 0; n < c.MinPairs || n < c.MaxPairs && f.Ratio.Error > StableError; n++ {
		first, total, err := ours.FirstResult(ctx)
		if err != nil {
			return err
		}
		firsts, totals = append(firsts, first), append(totals, total)
		ratios = append(ratios, float64(first)/float64(total))
		f.Ratio = spread(ratios)
	}
	f.First, f.Total = quantile(firsts, 0.5), quantile(totals, 0.5)
	if network == "tcp" && !c.Smoke {
		f.Required = hold(Required{Value: firstToTotal, AtMost: true}, f.Ratio.Median)
	}
	r.FirstResults = append(r.FirstResults, f)
	return nil
}

func (c Config) tell(format string, args ...any) {
	if c.Progress != nil {
		c.Progress(fmt.Sprintf(format, args...))
	}
}

// FillFloats writes float32 of random sign with magnitudes from 0.5 to 1, the same
// ones every time, and so touches every page. It is lent data.
func FillFloats(data []byte) {
	state := uint64(88172645463325252) // xorshift; any seed but 0
	for ; len(data) >= 8; data = data[8:] {
		state ^= state << 13
		state ^= state >> 7
		state ^= state << 17
		const fraction, half = 0x807f_ffff_807f_ffff, 0x3f00_0000_3f00_0000
		binary.LittleEndian.PutUint64(data, state&fraction|half)
	}
}
