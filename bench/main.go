// Command bench measures tensorferry beside its peers, above all Arrow Flight, and
// beside itself of another commit: the same tensor in turns, a server process and a
// client process for each. It prints the report of internal/bench.
//
// A peer does the work that we do, as its own documentation has it done: bytes
// are of use when they lie together in memory that has been there before, and a
// checksum of every piece has been checked. The package refuses to judge: it
// prints what is required beside what was measured. docs/benchmarks.md says the
// rest.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/tensorferry/tensorferry/bench/kinds"
	"github.com/tensorferry/tensorferry/bench/measure"
	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/harness"
)

func allKinds() []bench.Kind { return append(kinds.All(), flights()...) }

func main() {
	measure.BeEnd(allKinds())
	harness.Main("bench", run)
}

func run(ctx context.Context) error {
	size := flag.Int("size", tensorBytes, "`bytes` of the large tensors, a multiple of 8")
	quick := flag.Bool("quick", false, "run every part briefly, to see that it works: the figures mean nothing")
	rounds := flag.Int("rounds", bench.MinRounds, "minimum `rounds` per median, never below the default")
	batch := flag.Int("batch", bench.CallBatch, "small `calls` in a sample")
	net := flag.String("net", "tcp,unix", "`sockets`, with a comma between")
	works := flag.String("works", "", "the only `works`, with commas between: upload, echo, relu, call and so on")
	against := flag.String("against", "", "compare with a `commit` of this repository, not with peers")
	python := flag.String("python", "", "a `Python` with pyarrow and isal, for Arrow Flight in C++")
	machine := flag.Bool("machine", false, "compare with raw sockets, stock gRPC, TLS, tar and cp, not with peers")
	load := flag.Bool("load", false, "measure 1 to 16 connections with 1 to 64 calls in flight, and their memory")
	calls := flag.String("calls", "", "measure small calls of these `sizes`, with commas between, as README shows them and as one writes them without")
	busy := flag.Bool("busy", false, "keep every core busy beside it, with loops of the least priority")
	out := flag.String("out", "", "write page and samples to a `folder`, too: peers.*, machine.*, calls.*, against.* or load.*")
	flag.Parse()
	if flag.NArg() > 0 {
		return fmt.Errorf("%q; give no argument", flag.Args())
	}
	c := measure.Full(*size, *rounds)
	c.Batch = *batch
	if *quick {
		c = measure.Smoke()
		c.Size = min(*size, quickBytes)
	}
	c.Rules = rules()
	c.Progress = func(text string) { fmt.Fprintf(os.Stderr, "bench: %s\n", text) }
	r := &Report{Modules: peerModules()}
	dir, err := os.MkdirTemp("", "tensorferry-against-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	chosen := func(ops []bench.Op) []bench.Op {
		return slices.DeleteFunc(slices.Clone(ops), func(op bench.Op) bool {
			return *works != "" && !slices.Contains(strings.Split(*works, ","), string(op))
		})
	}
	var groups []measure.Group
	var old []string
	nets := strings.Split(*net, ",")
	if *against != "" {
		program, err := build(ctx, *against, dir)
		if err != nil {
			return err
		}
		old = []string{program, measure.EndArgument}
	}
	name := "peers"
	switch {
	case *machine:
		groups, name = kinds.Suite(nets, tensorBytes), "machine"
	case *calls != "":
		for text := range strings.SplitSeq(*calls, ",") {
			size, err := strconv.Atoi(text)
			if err != nil {
				return err
			}
			groups = append(groups, kinds.Calls(nets, size)...)
		}
		name = "calls"
	case *load:
		groups, name = loads(nets, old), "load"
	case old != nil:
		groups, name = turns(nets, old), "against"
	default:
		top, err := harness.Top(ctx)
		if err != nil {
			return err
		}
		ends := filepath.Join(top, "bench", "python", "ends.py")
		if r.Batches, err = sweep(ctx, c, chosen(both), languages(*python, ends)); err != nil {
			return err
		}
		groups = peers(nets, r.Batches)
	}
	for i := range groups {
		if groups[i].Ops = chosen(groups[i].Ops); groups[i].Size == tensorBytes {
			groups[i].Size = c.Size
		}
	}
	if *busy {
		end, err := measure.Busy(ctx)
		if err != nil {
			return err
		}
		defer func() { _ = end() }() // what was measured stands
	}
	done, err := c.Run(ctx, slices.DeleteFunc(groups, func(g measure.Group) bool { return len(g.Ops) == 0 }))
	if err != nil {
		return err
	}
	r.Report = *done
	r.Busy = *busy
	return write(r, os.Stdout, *out, name)
}

// build builds this program of this tree with everything else of another commit, so
// that both are measured by the same code.
func build(ctx context.Context, ref, dir string) (string, error) {
	top, err := harness.Top(ctx)
	if err != nil {
		return "", err
	}
	source := dir + "/source"
	if err := harness.Checkout(ctx, ref, source); err != nil {
		return "", err
	}
	for _, part := range []string{"/bench", "/internal/bench", "/internal/harness", "/internal/proc"} {
		if err := os.RemoveAll(source + part); err != nil {
			return "", err
		}
		if err := os.CopyFS(source+part, os.DirFS(top+part)); err != nil {
			return "", err
		}
	}
	if _, err := os.Stat(source + "/client/sequence.go"); errors.Is(err, fs.ErrNotExist) {
		if err := os.Remove(source + "/bench/kinds/steps.go"); err != nil {
			return "", err
		}
	}
	for file, text := range since {
		if err := os.Mkdir(filepath.Dir(source+file), 0o755); errors.Is(err, fs.ErrExist) {
			continue
		} else if err != nil {
			return "", err
		}
		if err := os.WriteFile(source+file, []byte(text), 0o644); err != nil {
			return "", err
		}
	}
	return harness.Build(ctx, source+"/bench", ".", dir+"/old", "-mod=mod")
}

// since are packages that older commits do not have, over what they have in their place.
var since = map[string]string{
	"/store/folder/folder.go": `package folder

import "github.com/tensorferry/tensorferry/store"

type Config = store.FolderConfig

var Open = store.OpenFolder
`,
	"/store/memory/memory.go": `package memory

import "github.com/tensorferry/tensorferry/store"

var New = store.NewMemory
`,
}
