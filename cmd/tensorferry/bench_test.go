package main

import (
	"context"
	"encoding/json"
	"errors"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

// benchSelf is a process of the command; TestMain sees to it that it is found.
func benchSelf(ctx context.Context, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "tensorferry", args...)
}

var quietBench = bench.Config{Command: benchSelf, Progress: func(string) {}}

func TestMemoryMeasureStreamsThroughTwoProcesses(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("peak memory is read from /proc")
	}
	testkit.Start(t)
	for _, network := range []string{"tcp", "unix"} {
		rows, err := quietBench.PeakMemory(t.Context(), network, 8*bench.MemoryBlock)
		require.NoError(t, err)
		if s := rows[0].Samples[0]; rows[0].Bytes != 8*bench.MemoryBlock || s.Server < 1<<20 || s.Client < 1<<20 {
			t.Errorf("%s: %+v", network, rows)
		}
	}
}

func TestMemoryMeasureTellsWhatItsClientSaid(t *testing.T) {
	testkit.Start(t)
	c := quietBench
	c.Command = func(ctx context.Context, args ...string) *exec.Cmd {
		if args[0] == "run" {
			args[1] = "no-such-model"
		}
		return benchSelf(ctx, args...)
	}
	_, err := c.PeakMemory(t.Context(), "tcp", 8*bench.MemoryBlock)
	if err == nil || !strings.Contains(err.Error(), `no model "no-such-model"`) {
		t.Fatalf("got %v", err)
	}
}

func TestMemoryMeasureEndsWithItsContext(t *testing.T) {
	testkit.Start(t)
	ctx, cancel := context.WithCancel(t.Context())
	c := quietBench
	c.Progress = func(string) { cancel() }
	_, err := c.PeakMemory(ctx, "tcp", 1<<40)
	if err == nil || ctx.Err() == nil {
		t.Fatalf("got %v", err)
	}
}

func TestAComparisonEndsWithItsContext(t *testing.T) {
	testkit.Start(t)
	ctx, cancel := context.WithCancel(t.Context())
	c := quietBench
	c.Size, c.MinRounds = 1<<20, 1<<20
	c.Progress = func(string) { cancel() }
	if _, err := c.Compare(ctx, "unix"); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
}

func TestBenchCommandSpeaksAsItsFlagsSay(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		exit int
	}{
		"json":                     {[]string{"--quick", "--json"}, 0},
		"an unknown socket":        {[]string{"--net", "pigeon"}, fail.ExitUsage},
		"a size between floats":    {[]string{"--size", "12"}, fail.ExitUsage},
		"a memory between blocks":  {[]string{"--memory", "--memory-bytes", "12"}, fail.ExitUsage},
		"memory over an odd thing": {[]string{"--memory", "--net", "pigeon"}, fail.ExitUsage},
	} {
		t.Run(name, func(t *testing.T) {
			c := benchSelf(t.Context(), append([]string{"bench"}, tc.args...)...)
			out, err := c.Output()
			if got := c.ProcessState.ExitCode(); got != tc.exit {
				t.Fatalf("exit %d, want %d: %v", got, tc.exit, err)
			}
			if json.Valid(out) != (tc.exit == 0) {
				t.Errorf("printed %.200s", out)
			}
		})
	}
}
