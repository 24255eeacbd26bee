package bench

import (
	"context"
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
}

// call is the work of small calls.
const call = "call"

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
	slabs, m := slab.NewPool(0, slab.System), Memory{}
	for _, part := range []*[]byte{&m.Source, &m.Remote, &m.Back} {
		s, err := slabs.Get(c.Size)
		if err != nil {
			return nil, err
		}
		defer s.Release() // which keeps it alive until then, too
		*part = s.Bytes()
		FillFloats(*part)
	}
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
	var o oursClient
	ours, err := ours(&o, noStore).Open(ctx, network, m)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ours.Close()) }()
	works := []string{string(Upload), string(Echo), string(ReLU)}
	if err := c.beside(ctx, r, network, m, works, ours, RawCRC, Raw, StockGRPC); err != nil {
		return err
	}
	if err := c.firstResult(ctx, r, network, o, ours); err != nil {
		return err
	}
	small := Memory{make([]byte, SmallBytes), make([]byte, SmallBytes), make([]byte, SmallBytes)}
	FillFloats(small.Source)
	if err := c.calls(ctx, r, network, small); err != nil {
		return err
	}
	c.tell("%s, small calls beside an upload", network)
	s, n, err := o.beside(ctx, ours, c.Batch, small)
	if err != nil {
		return err
	}
	r.Beside = append(r.Beside, Beside{Net: network, Bytes: len(m.Source), Calls: n, P50: s.Time, P99: s.P99})
	return c.stored(ctx, r, network, m)
}

// calls measures small calls.
func (c Config) calls(ctx context.Context, r *Report, network string, m Memory) (err error) {
	ours, err := Tensorferry.Open(ctx, network, m)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ours.Close()) }()
	return c.beside(ctx, r, network, m, []string{call}, ours, pings...)
}

// beside measures works of ours beside other kinds.
func (c Config) beside(ctx context.Context, r *Report, network string, m Memory, works []string, ours *Ends, kinds ...Kind) error {
	peers := make([]*Ends, len(kinds))
	for i, k := range kinds {
		p, err := k.Open(ctx, network, m)
		if err != nil {
			return err
		}
		defer func() { _ = p.Close() }() // whatever a cut connection gave the server
		peers[i] = p
	}
	for _, work := range works {
		do := func(p *Ends) func(context.Context) (Sample, error) {
			return func(ctx context.Context) (Sample, error) {
				if work == call {
					return batch(c.Batch, func() (time.Duration, error) { return p.ping(ctx) })
				}
				return p.Move(ctx, Op(work))
			}
		}
		for i, k := range kinds {
			if err := c.compare(ctx, r, network, work, len(m.Source), do(ours), Peer{Name: k.Name, Do: do(peers[i])}); err != nil {
				return err
			}
		}
	}
	return nil
}

// compare reports ours beside one peer, back to back.
func (c Config) compare(ctx context.Context, r *Report, network, work string, size int, ours func(context.Context) (Sample, error), theirs Peer) error {
	if network == "tcp" {
		theirs.Required = required[[2]string{work, theirs.Name}]
	}
	all, err := c.Rounds(ctx, network, work, size, Peer{Name: Tensorferry.Name, Do: ours}, theirs)
	r.Comparisons = append(r.Comparisons, all...)
	return err
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
func (c Config) firstResult(ctx context.Context, r *Report, network string, o oursClient, ours *Ends) error {
	c.tell("%s, first result", network)
	var ratios []float64
	var firsts, totals []time.Duration
	f := FirstResult{Net: network, Bytes: len(ours.near.Source)}
	for n := 0; n < c.MinPairs || n < c.MaxPairs && f.Ratio.Error > StableError; n++ {
		first, total, err := o.firstResult(ctx, ours)
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
