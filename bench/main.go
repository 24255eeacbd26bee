// Command bench measures tensorferry beside its peers, above all Arrow Flight for
// Go: the same tensor, uploads and echoes in turns, a server process and a client
// process for each. It prints a Markdown table and writes a picture of it.
//
// A peer does the work that we do, as its own documentation has it done: bytes
// are of use when they lie together in memory that has been there before, and a
// checksum of every piece has been checked. The package refuses to judge: it
// prints what is required beside what was measured. docs/benchmarks.md says the
// rest.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/tensorferry/tensorferry/internal/bench"
)

// endArgument makes the program a child, which is one end of one kind.
const endArgument = "end"

func main() {
	if len(os.Args) == 2 && os.Args[1] == endArgument {
		exit(serveEnd(os.Stdin, os.Stdout, kinds()))
	}
	var c config
	flag.IntVar(&c.size, "size", tensorBytes, "`bytes` of the tensor, a multiple of 8")
	flag.IntVar(&c.rounds, "rounds", bench.MinPairs, "least rounds that a median is taken of; fewer than the default are not")
	flag.BoolVar(&c.quick, "quick", false, "run every part briefly, to see that it works: the figures mean nothing")
	asJSON := flag.Bool("json", false, "print JSON, with every sample")
	out := flag.String("out", "", "write peers.md, peers.json and peers.svg to `folder`, too")
	against := flag.String("against", "", "compare with a `program` that is this one of another commit, not with peers")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "bench: unexpected %q\n", flag.Args())
		flag.Usage()
		os.Exit(2)
	}
	c.progress = func(text string) { fmt.Fprintf(os.Stderr, "bench: %s\n", text) }
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if *against != "" {
		exit(turns(ctx, c, *against, os.Stdout))
	}
	r, err := run(ctx, c)
	if err == nil {
		err = write(r, *asJSON, os.Stdout, *out)
	}
	exit(err)
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// kinds are all that take part, by name.
func kinds() map[string]bench.Kind {
	all := map[string]bench.Kind{}
	for _, k := range []bench.Kind{bench.RawCRC, bench.StockGRPC, bench.Tensorferry} {
		all[k.Name] = k
	}
	for _, sums := range []bool{false, true} {
		for _, batch := range batchSizes {
			k := flightKind(batch, sums)
			all[k.Name] = k
		}
	}
	return all
}

// works are what is measured, and what is required of the ratio to Flight doing
// the same work.
var works = []struct {
	op       bench.Op
	toFlight float64
}{
	{bench.Upload, uploadToFlight},
	{bench.Echo, echoToFlight},
}

// config says what to measure.
type config struct {
	size, rounds int
	quick        bool
	progress     func(string)
}

// measures returns what c asks for.
func (c config) measures() (bench.Config, error) {
	m := bench.Full(nil, c.size, c.rounds)
	if c.quick {
		m = bench.Smoke(nil)
		m.Size = min(c.size, quickBytes)
	}
	m.Progress = c.progress
	if m.Size < 8 || m.Size%8 != 0 {
		return m, fmt.Errorf("peers: tensors of %d bytes; give 8 or more, a multiple of 8", m.Size)
	}
	return m, nil
}

// turns compares ours with ours of another build of this program.
func turns(ctx context.Context, c config, program string, out io.Writer) error {
	m, err := c.measures()
	if err != nil {
		return err
	}
	var t bench.Turns
	for _, w := range works {
		all, err := rounds(ctx, m, w.op, []entrant{{kind: bench.Tensorferry.Name}, {kind: bench.Tensorferry.Name, program: program}})
		if err != nil {
			return err
		}
		t.AddPairs(all[0])
	}
	return t.WriteText(out)
}

// run finds the best batch size of Flight for each work, and then has everyone
// take turns.
func run(ctx context.Context, c config) (_ *Report, err error) {
	m, err := c.measures()
	if err != nil {
		return nil, err
	}
	r := newReport(m.Size, c.quick)
	for i, w := range works {
		r.Works = append(r.Works, Work{Op: w.op})
		for _, sums := range []bool{false, true} {
			batches, err := sweep(ctx, m, w.op, sums)
			if err != nil {
				return nil, err
			}
			r.Works[i].Batches = append(r.Works[i].Batches, batches...)
		}
	}
	for i, w := range works {
		if r.Works[i].Comparisons, err = compare(ctx, m, w.op, w.toFlight, r.Works[i].best()); err != nil {
			return nil, err
		}
	}
	r.LoadAfter = bench.ThisMachine().Load
	return r, nil
}

// sweep measures Flight with each batch size.
func sweep(ctx context.Context, m bench.Config, op bench.Op, sums bool) ([]Batch, error) {
	m.MinPairs = min(m.MinPairs, sweepRounds)
	m.MaxPairs = m.MinPairs
	var entrants []entrant
	for _, batch := range batchSizes {
		entrants = append(entrants, entrant{kind: flightKind(batch, sums).Name})
	}
	all, err := rounds(ctx, m, op, entrants)
	if err != nil {
		return nil, err
	}
	rates := []float64{all[0].Ours.Rate}
	for _, x := range all {
		rates = append(rates, x.Theirs.Rate)
	}
	best := slices.Index(rates, slices.Max(rates))
	var batches []Batch
	for i, rate := range rates {
		batches = append(batches, Batch{Kind: entrants[i].kind, Sums: sums, Bytes: batchSizes[i], Rate: rate, Best: i == best})
	}
	return batches, nil
}

// compare measures tensorferry beside everyone, of Flight the kinds named.
func compare(ctx context.Context, m bench.Config, op bench.Op, toFlight float64, flights []Batch) ([]*bench.Comparison, error) {
	entrants := []entrant{{kind: bench.Tensorferry.Name}, {kind: bench.RawCRC.Name}}
	for _, b := range flights {
		e := entrant{kind: b.Kind}
		if b.Sums {
			e.atLeast = toFlight
		}
		entrants = append(entrants, e)
	}
	return rounds(ctx, m, op, append(entrants, entrant{kind: bench.StockGRPC.Name}))
}

// entrant is a kind that takes part.
type entrant struct {
	kind    string
	program string  // of its processes, for startProcess
	atLeast float64 // the ratio required of the first entrant to it
}

// rounds compares the first entrant with the others.
func rounds(ctx context.Context, m bench.Config, op bench.Op, entrants []entrant) (_ []*bench.Comparison, err error) {
	all := kinds()
	var peers []bench.Peer
	for _, e := range entrants {
		c, err := openContestant(ctx, e.program, all[e.kind], m.Size)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, c.Close()) }()
		peers = append(peers, bench.Peer{
			Name: e.kind, AtLeast: e.atLeast,
			Do: func(ctx context.Context) (bench.Sample, error) { return c.Move(ctx, op) },
		})
	}
	return m.Rounds(ctx, "tcp", string(op), m.Size, peers[0], peers[1:]...)
}

// write writes r to out, and to the folder unless that is empty.
func write(r *Report, asJSON bool, out io.Writer, folder string) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	files := map[string][]byte{"peers.md": r.markdown(), "peers.svg": r.picture(), "peers.json": append(text, '\n')}
	shown := files["peers.md"]
	if asJSON {
		shown = files["peers.json"]
	}
	if _, err := out.Write(shown); err != nil || folder == "" {
		return err
	}
	if err := os.MkdirAll(folder, 0o777); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if err := os.WriteFile(filepath.Join(folder, name), files[name], 0o666); err != nil {
			return err
		}
	}
	return nil
}

// newReport is of this machine and this day.
func newReport(size int, quick bool) *Report {
	return &Report{
		Machine: bench.ThisMachine(), Date: time.Now().Format(time.DateOnly), Modules: peerModules(),
		Smoke: quick, Bytes: size,
	}
}
