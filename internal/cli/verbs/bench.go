package verbs

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/cli/serve"
	"github.com/tensorferry/tensorferry/internal/cli/settings"
)

const (
	benchBytes       = 256 << 20 // of the large tensors
	benchMemoryBytes = 16 << 30
	// The sizes that --quick has: enough for a stream to outgrow every buffer.
	quickBytes       = 8 << 20
	quickMemoryBytes = 64 << 20
)

func benchCommand() *cobra.Command {
	var network string
	var size, pairs int
	var quick, asJSON, memory bool
	var memoryBytes int64
	c := &cobra.Command{
		Use:   "bench",
		Short: "compare tensorferry with raw sockets and gRPC on this machine",
		Long: `Bench moves tensors between a client process and a server process and compares the
speed with raw sockets and stock gRPC that do the same work. It runs them in turn
until the medians of the ratios are stable, which takes a few minutes.
docs/benchmarks.md describes what is measured, and how; in the repository, make bench
compares more.

With --memory, it streams one large tensor between a server process and a client
process and prints the peak memory of each.`,
		Example: `  tensorferry bench --net both
  tensorferry bench --memory`,
		Args: Takes(0),
		RunE: func(c *cobra.Command, _ []string) error {
			sized := c.Flags().Changed("memory-bytes")
			if memory && quick && !sized {
				memoryBytes = quickMemoryBytes
			}
			switch {
			case sized && !memory:
				return fail.Usage("--memory-bytes needs --memory")
			case memory && (memoryBytes < bench.MemoryBlock || memoryBytes%bench.MemoryBlock != 0):
				return fail.Usage("--memory-bytes %d: use a multiple of %d", memoryBytes, bench.MemoryBlock)
			case size < 8 || size%8 != 0:
				return fail.Usage("--size %d: use a multiple of 8, at least 8", size)
			}
			self, err := os.Executable()
			if err != nil {
				return err
			}
			cfg := bench.Config{
				Command: func(ctx context.Context, args ...string) *exec.Cmd { return exec.CommandContext(ctx, self, args...) },
				Size:    size, MinRounds: max(pairs, bench.MinRounds), MaxRounds: max(pairs, bench.MaxRounds), Calls: bench.CallBatch,
				Progress: func(text string) { fmt.Fprintf(os.Stderr, "bench: %s\n", text) },
			}
			if quick {
				cfg.Size, cfg.MinRounds, cfg.MaxRounds, cfg.Calls = min(size, quickBytes), 2, 2, 50
			}
			measure := cfg.Compare
			if memory {
				measure = func(ctx context.Context, network string) (bench.Rows, error) {
					return cfg.PeakMemory(ctx, network, memoryBytes)
				}
			}
			var rows bench.Rows
			for _, n := range map[string][]string{"tcp": {"tcp"}, "unix": {"unix"}, "both": {"tcp", "unix"}}[network] {
				more, err := measure(c.Context(), n)
				if err != nil {
					return err
				}
				rows = append(rows, more...)
			}
			if asJSON {
				return display.JSON(c.OutOrStdout(), rows)
			}
			return writeRows(c.OutOrStdout(), rows, quick)
		},
	}
	f := c.Flags()
	settings.Choice(f, &network, "net", "`socket`", "tcp", "unix", "both")
	f.IntVar(&size, "size", benchBytes, "size of the large tensors in `bytes`")
	settings.Count(f, &pairs, "pairs", bench.MinRounds, "minimum pairs per median, never below the default")
	f.BoolVar(&quick, "quick", false, "only test that every part runs; the figures mean nothing")
	f.BoolVar(&asJSON, "json", false, "print JSON with every sample")
	f.BoolVar(&memory, "memory", false, "measure peak memory instead of speed")
	f.Int64Var(&memoryBytes, "memory-bytes", benchMemoryBytes, "size of the tensor for --memory in `bytes`")
	return c
}

func writeRows(w io.Writer, rows bench.Rows, quick bool) error {
	fmt.Fprintf(w, "tensorferry %s · %d cores · %s %s/%s\n", serve.Version, runtime.GOMAXPROCS(0), runtime.Version(), runtime.GOOS, runtime.GOARCH)
	if quick {
		fmt.Fprintln(w, "SMOKE RUN: sizes and repetitions are too small for the figures to mean anything")
	}
	return rows.WriteText(w)
}
