package main

import (
	"context"
	"encoding/json"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

// benchSelf is a process of the command; TestMain sees to it that it is found.
func benchSelf(ctx context.Context, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "tensorferry", args...)
}

func TestMemoryMeasureStreamsThroughTwoProcesses(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("peak memory is read from /proc")
	}
	testkit.Start(t)
	for _, network := range []string{"tcp", "unix"} {
		r, err := bench.PeakMemory(t.Context(), bench.MemoryConfig{Command: benchSelf, Bytes: 8 * bench.MemoryBlock, Network: network})
		if err != nil {
			t.Fatal(err)
		}
		if r.Bytes != 8*bench.MemoryBlock || r.Server < 1<<20 || r.Client < 1<<20 || r.Required == nil {
			t.Errorf("%s: %+v", network, r)
		}
	}
}

func TestMemoryMeasureTellsWhatItsClientSaid(t *testing.T) {
	testkit.Start(t)
	_, err := bench.PeakMemory(t.Context(), bench.MemoryConfig{
		Command: func(ctx context.Context, args ...string) *exec.Cmd {
			if args[0] == "run" {
				args[1] = "no-such-model"
			}
			return benchSelf(ctx, args...)
		},
		Bytes: 8 * bench.MemoryBlock, Network: "tcp",
	})
	if err == nil || !strings.Contains(err.Error(), `no model "no-such-model"`) {
		t.Fatalf("got %v", err)
	}
}

func TestMemoryMeasureEndsWithItsContext(t *testing.T) {
	testkit.Start(t)
	ctx, cancel := context.WithCancel(t.Context())
	_, err := bench.PeakMemory(ctx, bench.MemoryConfig{
		Command: benchSelf, Bytes: 1 << 40, Network: "tcp",
		Progress: func(string) { cancel() },
	})
	if err == nil || ctx.Err() == nil {
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
