package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/bench/kinds"
	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/cli/settings"
	"github.com/tensorferry/tensorferry/internal/cli/verbs"
)

const (
	// benchBytes and benchMemoryBytes are the sizes that the required figures refer to.
	benchBytes       = 256 << 20
	benchMemoryBytes = 16 << 30
	quickMemoryBytes = 64 << 20 // enough for a stream to outgrow every buffer
)

type benchOptions struct {
	net                 string
	size, pairs         int
	works               []string
	quick, json, memory bool
	memoryBytes         int64
}

func benchCommand() *cobra.Command {
	var o benchOptions
	c := &cobra.Command{
		Use:   "bench",
		Short: "compare tensorferry with raw sockets, gRPC and cp on this machine",
		Long: `Bench moves tensors between a client process and a server process and compares the
speed with raw sockets and stock gRPC that do the same work. It runs them in turn
until the medians of the ratios are stable, which takes several minutes.
docs/benchmarks.md describes what is measured, and how.

Pushes and pulls use a store in the folder for temporary files (TMPDIR) and are
compared with cp in the same folder. Bench removes its files at the end.

With --memory, it streams one large tensor between a server process and a client
process and prints the peak memory of each.`,
		Example: `  tensorferry bench --net both
  tensorferry bench --memory`,
		Args: verbs.Takes(0),
		RunE: func(c *cobra.Command, _ []string) error {
			sized := c.Flags().Changed("memory-bytes")
			if o.memory && o.quick && !sized {
				o.memoryBytes = quickMemoryBytes
			}
			nets := map[string][]string{"tcp": {"tcp"}, "unix": {"unix"}, "both": {"tcp", "unix"}}[o.net]
			switch {
			case sized && !o.memory:
				return fail.Usage("--memory-bytes needs --memory")
			case o.memory && (o.memoryBytes < bench.MemoryBlock || o.memoryBytes%bench.MemoryBlock != 0):
				return fail.Usage("--memory-bytes %d: use a multiple of %d", o.memoryBytes, bench.MemoryBlock)
			case o.memory:
				return benchMemory(c.Context(), nets, o, c.OutOrStdout())
			case o.size < 8 || o.size%8 != 0:
				return fail.Usage("--size %d: use a multiple of 8, at least 8", o.size)
			}
			return benchSpeed(c.Context(), nets, o, c.OutOrStdout())
		},
	}
	f := c.Flags()
	settings.Choice(c.Flags(), &o.net, "net", "`socket`", "tcp", "unix", "both")
	f.IntVar(&o.size, "size", benchBytes, "size of the large tensors in `bytes`")
	settings.Count(f, &o.pairs, "pairs", bench.MinRounds, "minimum pairs per median, never below the default")
	f.StringSliceVar(&o.works, "works", nil, "measure only these `works`, such as push,pull")
	f.BoolVar(&o.quick, "quick", false, "only test that every part runs; the figures mean nothing")
	f.BoolVar(&o.json, "json", false, "print JSON with every sample")
	f.BoolVar(&o.memory, "memory", false, "measure peak memory instead of speed")
	f.Int64Var(&o.memoryBytes, "memory-bytes", benchMemoryBytes, "size of the tensor for --memory in `bytes`")
	return c
}

func progress(text string) { fmt.Fprintf(os.Stderr, "bench: %s\n", text) }

func benchSpeed(ctx context.Context, nets []string, o benchOptions, out io.Writer) error {
	cfg := bench.Full(o.size, o.pairs)
	if o.quick {
		cfg = bench.Smoke()
	}
	cfg.Progress, cfg.Rules = progress, kinds.Rules()
	groups := kinds.Suite(nets, o.size, o.works...)
	if len(groups) == 0 {
		return fail.Usage("--works %s: bench measures none of them; see docs/benchmarks.md", strings.Join(o.works, ","))
	}
	r, err := cfg.Run(ctx, groups)
	switch {
	case err != nil:
		return err
	case o.json:
		return display.JSON(out, r)
	}
	return r.WriteText(out)
}

func benchMemory(ctx context.Context, nets []string, o benchOptions, out io.Writer) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	var all []*bench.MemoryReport
	for _, network := range nets {
		r, err := bench.PeakMemory(ctx, bench.MemoryConfig{
			Command: func(ctx context.Context, args ...string) *exec.Cmd { return exec.CommandContext(ctx, self, args...) },
			Bytes:   o.memoryBytes, Network: network, Progress: progress,
		})
		if err != nil {
			return err
		}
		all = append(all, r)
		if o.json {
			continue
		}
		if err := r.WriteText(out); err != nil {
			return err
		}
	}
	if o.json {
		return display.JSON(out, all)
	}
	return nil
}
