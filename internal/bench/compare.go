package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/proc"
)

// Config says how to compare.
type Config struct {
	// Command returns a process of this program that has not been started.
	Command func(ctx context.Context, args ...string) *exec.Cmd
	Size    int // bytes of the large tensors: 8 or more, a multiple of 8
	// A median is taken of MinRounds rounds at least, and of more, up to MaxRounds,
	// until it is known to StableError.
	MinRounds, MaxRounds int
	Calls                int // small calls in a sample
	// Progress is told what is measured next, or how far it is.
	Progress func(text string)
}

// Row is one kind of work done by one kind, and by tensorferry in the same rounds.
type Row struct {
	Net   string        `json:"net"`
	Work  Op            `json:"work"`
	Bytes int64         `json:"bytes"`
	Who   string        `json:"who"`
	Time  time.Duration `json:"time_ns"` // the median
	P99   time.Duration `json:"p99_ns,omitempty"`
	Rate  float64       `json:"gb_per_second,omitempty"` // of 10⁹ bytes; an echo's count once
	// Ratio is tensorferry's rate to theirs or, of calls, its time to theirs, within a
	// round. It is empty for tensorferry.
	Ratio   Spread   `json:"ratio"`
	Samples []Sample `json:"samples"`
}

// Rows are a table.
type Rows []Row

// memory is the work of PeakMemory.
const memory Op = "memory"

func rate(n int64, took time.Duration) float64 { return float64(n) / float64(took) }

// ServeArgument makes a program the server of one kind: it calls BeServer.
const ServeArgument = "bench-server"

// kinds are those that are compared, ours first. Its server is that of the serve command.
var kinds = []Kind{
	{Name: OursWith(codec.CRC32C), Dial: dialOurs},
	Raw(codec.CRC32C, ChunkBytes),
	Raw(codec.CRC32C, SmallPiece),
	Stock(StockGRPC, ChunkBytes),
}

// BeServer has a process that was started as a server be one, and exit.
func BeServer() {
	if len(os.Args) != 6 || os.Args[1] != ServeArgument {
		return
	}
	if err := serveKind(context.Background(), os.Args[2], os.Args[3], os.Args[4], os.Args[5]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// serveKind serves a kind, prints its address, and ends with its input.
func serveKind(ctx context.Context, kind, network, address, size string) error {
	n, err := strconv.Atoi(size)
	at := slices.IndexFunc(kinds, func(k Kind) bool { return k.Name == kind && k.Serve != nil })
	if err != nil || n < 8 || at < 0 {
		return fmt.Errorf("bench: no server of %q for %q bytes", kind, size)
	}
	l, err := net.Listen(network, address)
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	go func() { // ends with the process
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop()
	}()
	to, free, err := Memory(n)
	if err != nil {
		return err
	}
	defer free()
	fmt.Println(l.Addr())
	return kinds[at].Serve(ctx, l, Place{To: to})
}

// Compare measures every kind over a network.
func (c Config) Compare(ctx context.Context, network string) (rows Rows, err error) {
	for _, g := range []struct {
		ops  []Op
		size int
	}{{[]Op{Upload, Echo}, c.Size}, {[]Op{Call}, SmallBytes}} {
		found, err := c.compare(ctx, network, g.ops, g.size)
		if err != nil {
			return nil, err
		}
		rows = append(rows, found...)
	}
	return rows, nil
}

func (c Config) compare(ctx context.Context, network string, ops []Op, size int) (rows Rows, err error) {
	ctx, cancel := context.WithCancel(ctx)
	var ends []func() error
	defer func() {
		if ctx.Err() != nil {
			err = context.Cause(ctx) // and not what it broke
		}
		for _, end := range slices.Backward(ends) {
			err = errors.Join(err, end())
		}
		cancel()
	}()
	dir, err := os.MkdirTemp("", "tensorferry-bench-")
	if err != nil {
		return nil, err
	}
	ends = append(ends, func() error { return os.RemoveAll(dir) })
	p := Place{Network: network}
	for _, mem := range []*[]byte{&p.Source, &p.To} {
		b, free, err := Memory(size)
		if err != nil {
			return nil, err
		}
		ends = append(ends, func() error { free(); return nil })
		*mem = b
	}
	var clients []Client
	for i, k := range kinds {
		listen := map[string]string{"tcp": "127.0.0.1:0", "unix": filepath.Join(dir, strconv.Itoa(i))}[network]
		args := []string{ServeArgument, k.Name, network, listen, strconv.Itoa(size)}
		if k.Serve == nil {
			at := p
			at.Address = listen
			args = []string{"serve", "--child", "--engine", "cpu", "--metrics", "off", "--listen", Address(at)}
		}
		server, address, err := proc.Serve(ctx, c.Command(ctx, args...))
		if err != nil {
			return nil, err
		}
		ends = append(ends, server.Stop)
		if p.Address = address; network == "unix" {
			p.Address = listen
		}
		one, err := k.Dial(ctx, p)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", k.Name, err)
		}
		ends = append(ends, one.Close)
		clients = append(clients, one)
	}
	for _, op := range ops {
		c.Progress(fmt.Sprintf("%s, %s of %s", network, op, ByteText(size)))
		found := make([]Row, len(kinds))
		for i, k := range kinds {
			found[i] = Row{Net: network, Work: op, Bytes: int64(size), Who: k.Name}
		}
		err := Turns(len(kinds), func(i, round int) error {
			s, err := clients[i].Do(ctx, op, p, c.Calls)
			if err != nil {
				return fmt.Errorf("%s, %s: %w", kinds[i].Name, op, err)
			}
			if round > 0 {
				found[i].Samples = append(found[i].Samples, s)
			}
			return nil
		}, func(round int) bool {
			unknown := 0.0
			for i := range found {
				if round > 0 {
					found[i].sum(found[0].Samples)
				}
				unknown = max(unknown, found[i].Ratio.Error)
			}
			return round < c.MinRounds || round < c.MaxRounds && unknown > StableError
		})
		if err != nil {
			return nil, err
		}
		rows = append(rows, found...)
	}
	return rows, nil
}

// Turns has n take turns in rounds, as long as again is true. The order of a round is opposite
// to that of the one before, so that over two of them everybody is as early as everybody
// else. Round 0, which touches pages and opens windows, should not count.
func Turns(n int, do func(i, round int) error, again func(round int) bool) error {
	for round := 0; ; round++ {
		for at := range n {
			i := at
			if round%2 == 1 {
				i = n - 1 - at
			}
			if err := do(i, round); err != nil {
				return err
			}
		}
		if !again(round) {
			return nil
		}
	}
}

// sum makes the medians of the samples, beside ours.
func (r *Row) sum(ours []Sample) {
	var times, p99s []time.Duration
	var ratios []float64
	for i, s := range r.Samples {
		times, p99s = append(times, s.Time), append(p99s, s.P99)
		ratio := float64(ours[i].Time) / float64(s.Time)
		if r.Work != Call {
			ratio = 1 / ratio
		}
		ratios = append(ratios, ratio)
	}
	r.Time, r.P99 = Quantile(times, 0.5), Quantile(p99s, 0.5)
	if r.Work != Call {
		r.Rate = rate(r.Bytes, r.Time)
	}
	if r.Who != kinds[0].Name {
		r.Ratio = NewSpread(ratios)
	}
}

// WriteText writes a table for people.
func (rows Rows) WriteText(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "NET\tWORK\tWHO\t\tRATIO\t\tROUNDS")
	for _, r := range rows {
		speed, rest := fmt.Sprintf("%.2f GB/s", r.Rate), fmt.Sprintf("%s\t%d", r.Ratio, len(r.Samples))
		switch r.Work {
		case Call:
			speed = fmt.Sprintf("%s p50  %s p99", TimeText(r.Time), TimeText(r.P99))
		case memory:
			s := r.Samples[0]
			rest = fmt.Sprintf("at most %.1f MiB in the server, %.1f in the client; required %d: %s", float64(s.Server)/(1<<20), float64(s.Client)/(1<<20),
				PeakBytes>>20, map[bool]string{true: "met", false: "MISSED"}[max(s.Server, s.Client) <= PeakBytes])
		}
		fmt.Fprintf(t, "%s\t%s of %s\t%s\t%s\t%s\n", r.Net, r.Work, ByteText(int(r.Bytes)), r.Who, speed, rest)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprint(w, `
A ratio is the median of the ratios of two runs of one round: tensorferry's rate to theirs
or, for calls, its time to theirs. ± encloses the true median in 95 of 100 runs. Rates count
a tensor's bytes once: an echo moves them both ways. Memory is that of each process at its peak.
`)
	return err
}

// TimeText has three digits, more or less.
func TimeText(d time.Duration) string {
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
