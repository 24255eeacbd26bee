// Command bench measures tensorferry beside its peers, above all Arrow Flight for
// Go: the same tensor, uploads and echoes in turns, a server process and a client
// process for each. It prints the report of internal/bench, and draws it.
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
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/tensorferry/tensorferry/internal/bench"
)

// endArgument makes the program a child, which is one end of one kind.
const endArgument = "end"

func main() {
	if len(os.Args) == 2 && os.Args[1] == endArgument {
		exit(serveEnd(os.Stdin, os.Stdout))
	}
	size := flag.Int("size", tensorBytes, "`bytes` of the tensor, a multiple of 8")
	quick := flag.Bool("quick", false, "run every part briefly, to see that it works: the figures mean nothing")
	out := flag.String("out", "", "write peers.md, peers.json and peers.svg to `folder`, too")
	against := flag.String("against", "", "compare with a `program` that is this one of another commit, not with peers")
	flag.Parse()
	c := bench.Full(nil, *size, 0)
	if *quick {
		c = bench.Smoke(nil)
		c.Size = min(*size, quickBytes)
	}
	c.Progress = func(text string) { fmt.Fprintf(os.Stderr, "bench: %s\n", text) }
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	switch {
	case flag.NArg() > 0 || c.Size < 8 || c.Size%8 != 0:
		exit(fmt.Errorf("%q and tensors of %d bytes; give no argument, and 8 or more, a multiple of 8", flag.Args(), c.Size))
	case *against != "":
		exit(turns(ctx, c, *against, os.Stdout))
	}
	r, err := run(ctx, c)
	if err == nil {
		err = write(r, os.Stdout, *out)
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
	for _, k := range append(flights(false), append(flights(true), bench.RawCRC, bench.StockGRPC, bench.Tensorferry)...) {
		all[k.Name] = k
	}
	return all
}

// flights are Flight with each batch size.
func flights(sums bool) (all []bench.Kind) {
	for _, batch := range batchSizes {
		all = append(all, flightKind(batch, sums))
	}
	return all
}

// turns compares ours with ours of another build of this program.
func turns(ctx context.Context, c bench.Config, program string, out io.Writer) error {
	var t bench.Turns
	for _, w := range works {
		all, err := rounds(ctx, c, w.op, []entrant{{kind: bench.Tensorferry.Name}, {kind: bench.Tensorferry.Name, program: program}})
		if err != nil {
			return err
		}
		t.AddPairs(all[0])
	}
	return t.WriteText(out)
}

// run finds the best batch size of Flight for each work, and then has everyone
// take turns.
func run(ctx context.Context, c bench.Config) (*Report, error) {
	r := &Report{Date: time.Now().Format(time.DateOnly), Modules: peerModules()}
	r.Machine, r.Smoke = bench.ThisMachine(), c.Smoke
	for _, w := range works {
		entrants := []entrant{{kind: bench.Tensorferry.Name}, {kind: bench.RawCRC.Name}}
		for _, sums := range []bool{false, true} {
			batches, best, err := sweep(ctx, c, w.op, sums)
			if err != nil {
				return nil, err
			}
			r.Batches = append(r.Batches, batches...)
			if sums {
				best.atLeast = w.toFlight
			}
			entrants = append(entrants, best)
		}
		all, err := rounds(ctx, c, w.op, append(entrants, entrant{kind: bench.StockGRPC.Name}))
		if err != nil {
			return nil, err
		}
		r.Comparisons = append(r.Comparisons, all...)
	}
	r.LoadAfter = bench.ThisMachine().Load
	return r, nil
}

// sweep measures Flight with each batch size, and returns the best, too.
func sweep(ctx context.Context, c bench.Config, op bench.Op, sums bool) (batches []Batch, best entrant, err error) {
	c.MinPairs = min(c.MinPairs, sweepRounds)
	c.MaxPairs = c.MinPairs
	var entrants []entrant
	for _, k := range flights(sums) {
		entrants = append(entrants, entrant{kind: k.Name})
	}
	all, err := rounds(ctx, c, op, entrants)
	if err != nil {
		return nil, best, err
	}
	at := 0
	for i, e := range entrants {
		rate := all[0].Ours.Rate
		if i > 0 {
			rate = all[i-1].Theirs.Rate
		}
		batches = append(batches, Batch{Op: op, Kind: e.kind, Sums: sums, Bytes: batchSizes[i], Rate: rate})
		if rate > batches[at].Rate {
			at = i
		}
	}
	batches[at].Best = true
	return batches, entrants[at], nil
}

// entrant is a kind that takes part.
type entrant struct {
	kind    string
	program string  // of its processes, for startProcess
	atLeast float64 // the ratio required of the first entrant to it
}

// rounds compares the first entrant with the others.
func rounds(ctx context.Context, c bench.Config, op bench.Op, entrants []entrant) (_ []*bench.Comparison, err error) {
	var peers []bench.Peer
	for _, e := range entrants {
		p, err := openContestant(ctx, e.program, e.kind, c.Size)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, p.Close()) }()
		peers = append(peers, bench.Peer{
			Name: e.kind, Required: bench.Required{Value: e.atLeast},
			Do: func(ctx context.Context) (bench.Sample, error) { return p.Move(ctx, op) },
		})
	}
	return c.Rounds(ctx, "tcp", string(op), c.Size, peers[0], peers[1:]...)
}

// write writes the page of r to out, and everything to the folder unless that is empty.
func write(r *Report, out io.Writer, folder string) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	page := r.page()
	if _, err := out.Write(page); err != nil || folder == "" {
		return err
	}
	err = os.MkdirAll(folder, 0o777)
	for name, data := range map[string][]byte{"peers.md": page, "peers.svg": r.picture(), "peers.json": append(text, '\n')} {
		if err == nil {
			err = os.WriteFile(filepath.Join(folder, name), data, 0o666)
		}
	}
	return err
}
