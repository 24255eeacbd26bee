//go:build linux && cgo

package main

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine/cuda/fakecuda"
	"github.com/tensorferry/tensorferry/internal/cli/demo"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/cli/moving"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

func TestCommandsOnAFakeDeviceDoWhatTheScriptsSay(t *testing.T) {
	testkit.Start(t)
	driver := fakecuda.Build(t, fakecuda.Options{})
	t.Run("script", func(t *testing.T) {
		testscript.Run(t, testscript.Params{
			Dir: "testdata/cuda", RequireExplicitExec: true,
			Setup: func(e *testscript.Env) error {
				e.Setenv("DRIVER", driver)
				e.Setenv("GORACE", raceOptions)
				return nil
			},
			Cmds: map[string]func(*testscript.TestScript, bool, []string){
				"exits": scriptExits, "server": scriptServer, "models": scriptModels, "safetensors": scriptSafetensors,
			},
		})
	})
}

func TestAServerOnAFakeDeviceOutlivesItsClients(t *testing.T) {
	testkit.Start(t)
	exe, err := exec.LookPath("tensorferry")
	require.NoError(t, err)
	server, address, err := demo.Start(t.Context(), exe, "--engine", "cuda:0", "--cuda-driver", fakecuda.Build(t, fakecuda.Options{}))
	require.NoError(t, err)
	defer func() { require.NoError(t, server.Stop()) }()
	cl, err := client.Dial(address, client.Config{})
	require.NoError(t, err)
	defer cl.Close()

	random := rand.New(rand.NewPCG(1, 1))
	for i := range 200 {
		s, err := cl.Session(t.Context())
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		if i%2 == 0 {
			time.AfterFunc(time.Duration(random.IntN(8000))*time.Microsecond, cancel)
		}
		n := random.IntN(400_000)
		x, err := tensor.Of(make([]float32, n), int64(n))
		require.NoError(t, err)
		_, err = s.Compute(ctx, []string{"relu", "echo", "sink"}[i%3], x)
		cancel()
		if err != nil && !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		require.NoError(t, s.Close())
	}
	for i := range 20 {
		c := fed(t, "run", "relu", "--server", address, "--dtype", "float32", "--shape", "1000000000")
		if i%2 == 0 { // else it may not even have begun
			testkit.Eventually(t, func() bool {
				info, err := cl.Info(t.Context())
				require.NoError(t, err)
				return info.Counters["calls"] > 0
			}, "the call")
		}
		require.NoError(t, c.Process.Signal(os.Kill))
		_ = c.Wait()
	}
	testkit.Eventually(t, func() bool {
		info, err := cl.Info(t.Context())
		require.NoError(t, err)
		for _, m := range info.Models {
			if g := m.Gauges; g["pinned_used_bytes"]+g["device_blocks"] > 0 {
				return false
			}
		}
		c := info.Counters
		return c["calls"]+c["sessions"]+c["memory_used_bytes"] == 0
	}, "a server without a call")
	require.NotContains(t, strings.ToLower(fmt.Sprint(server.Log.Tail())), "error")
}

func TestAClientThatTakesNoResultsLeavesPageLockedMemoryToOthers(t *testing.T) {
	testkit.Start(t)
	address := serving(t, "--engine", "cuda:0", "--pinned", "16MiB", "--cuda-driver", fakecuda.Build(t, fakecuda.Options{}))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	slow, err := client.Dial(address, client.Config{})
	require.NoError(t, err)
	defer slow.Close()
	open, err := slow.Session(t.Context())
	require.NoError(t, err)
	never := moving.WriterFunc(func([]byte) (int, error) {
		<-ctx.Done()
		return 0, ctx.Err()
	})
	desc := tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{64 << 20}}
	_, err = open.Call(ctx, client.Request{
		Model: "echo", Inputs: []client.Input{client.FromReader("x", desc, bytes.NewReader(make([]byte, 64<<20)))},
		Results: map[string]client.Sink{"y": client.Writer(func(tensor.Desc) (io.Writer, error) { return never, nil })},
	})
	require.NoError(t, err)
	cl, err := client.Dial(address, client.Config{})
	require.NoError(t, err)
	defer cl.Close()
	testkit.Eventually(t, func() bool {
		info, err := cl.Info(t.Context())
		require.NoError(t, err)
		for _, m := range info.Models {
			if m.Name == "echo" {
				return m.Gauges["pinned_used_bytes"] > 4<<20 && m.Gauges["device_blocks"] == 0
			}
		}
		return false
	}, "a call that holds its results")
	x, err := tensor.Of(make([]float32, 1<<20), 1<<20)
	require.NoError(t, err)
	soon, late := context.WithTimeout(t.Context(), 20*time.Second) // the other expires after 30
	defer late()
	_, err = cl.Compute(soon, "relu", x)
	require.NoError(t, err)
	cancel()
}

func TestAServerSaysThatItsDeviceIsLostAndEndsWithItIfAsked(t *testing.T) {
	testkit.Start(t)
	exe, err := exec.LookPath("tensorferry")
	require.NoError(t, err)
	t.Setenv("FAKECUDA", "async fail cuLaunchKernel 700 after 10 times 1")
	for _, ends := range []bool{false, true} {
		t.Run(fmt.Sprint("ends=", ends), func(t *testing.T) {
			options := []string{"--engine", "cuda:0", "--cuda-driver", fakecuda.Build(t, fakecuda.Options{}), fmt.Sprint("--exit-on-device-loss=", ends)}
			server, address, err := demo.Start(t.Context(), exe, options...)
			require.NoError(t, err)
			defer func() { _ = server.Stop() }()
			cl, err := client.Dial(address, client.Config{})
			require.NoError(t, err)
			defer cl.Close()
			x, err := tensor.Of(make([]float32, 1000), 1000)
			require.NoError(t, err)
			for range 10 {
				_, err := cl.Compute(t.Context(), "relu", x)
				require.NoError(t, err)
			}
			_, err = cl.Compute(t.Context(), "relu", x)
			require.Equal(t, codes.Unavailable, status.Code(err), "%v", err)
			require.ErrorContains(t, err, "device cuda:0 is lost")
			require.ErrorContains(t, err, "restart the process")
			if ends {
				require.Error(t, server.Wait())
				require.Equal(t, fail.ExitDevice, server.ProcessState.ExitCode())
				require.Contains(t, server.Log.Tail(), "a device was lost")
				return
			}
			info, err := cl.Info(t.Context())
			require.NoError(t, err)
			for _, m := range info.Models {
				require.Contains(t, m.Unavailable, "CUDA_ERROR_ILLEGAL_ADDRESS", m.Name)
			}
			require.NoError(t, server.Stop())
		})
	}
}

func TestTheProgramNeedsNoNewSystemAndNothingOfCUDA(t *testing.T) {
	path, err := os.Executable() // which has all that the program has
	require.NoError(t, err)
	f, err := elf.Open(path)
	require.NoError(t, err)
	defer f.Close()
	libraries, err := f.ImportedLibraries()
	require.NoError(t, err)
	require.Empty(t, slices.DeleteFunc(libraries, func(name string) bool {
		return slices.Contains([]string{"libc.so.6", "libdl.so.2", "libpthread.so.0", "libresolv.so.2", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}, name)
	}))
	symbols, err := f.ImportedSymbols()
	require.NoError(t, err)
	for _, s := range symbols {
		var major, minor int
		if n, _ := fmt.Sscanf(s.Version, "GLIBC_%d.%d", &major, &minor); n == 2 && (major > 2 || minor > 34) {
			t.Errorf("%s needs glibc %d.%d; Debian 12 and Ubuntu 22.04 have 2.35 or more, RHEL 9 has 2.34", s.Name, major, minor)
		}
	}
}
