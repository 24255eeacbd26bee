package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

// benchChild is set for processes of this test program that are to be the
// command itself: the memory measure starts a server and a client.
const benchChild = "TENSORFERRY_BENCH_CHILD"

func init() {
	if os.Getenv(benchChild) != "" {
		main()
	}
}

func benchSelf(ctx context.Context, args ...string) *exec.Cmd {
	c := exec.CommandContext(ctx, os.Args[0], args...)
	c.Env = append(os.Environ(), benchChild+"=1")
	return c
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
	if err == nil || !bytes.Contains([]byte(err.Error()), []byte(`no model "no-such-model"`)) {
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
		json bool
	}{
		"json":                     {[]string{"--quick", "--json"}, 0, true},
		"benchstat":                {[]string{"--quick", "--benchstat", "--net", "unix"}, 0, false},
		"an unknown socket":        {[]string{"--net", "pigeon"}, exitUsage, false},
		"two formats":              {[]string{"--json", "--benchstat"}, exitUsage, false},
		"a size between floats":    {[]string{"--size", "12"}, exitUsage, false},
		"a memory between blocks":  {[]string{"--memory", "--memory-bytes", "12"}, exitUsage, false},
		"memory over an odd thing": {[]string{"--memory", "--net", "pigeon"}, exitUsage, false},
	} {
		t.Run(name, func(t *testing.T) {
			c := benchSelf(t.Context(), append([]string{"bench"}, tc.args...)...)
			out, err := c.Output()
			if got := c.ProcessState.ExitCode(); got != tc.exit {
				t.Fatalf("exit %d, want %d: %v", got, tc.exit, err)
			}
			if json.Valid(out) != tc.json || len(out) > 0 != (tc.exit == 0) {
				t.Errorf("printed %.200s", out)
			}
		})
	}
}
