//go:build linux && cgo

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine/cuda/fakecuda"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

func TestCommandsOnAFakeDeviceDoWhatTheScriptsSay(t *testing.T) {
	testkit.Start(t)
	driver := fakecuda.Build(t)
	t.Run("script", func(t *testing.T) {
		testscript.Run(t, testscript.Params{
			Dir: "testdata/cuda", RequireExplicitExec: true,
			Setup: func(e *testscript.Env) error {
				e.Setenv("DRIVER", driver)
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
	server, address, err := startServer(t.Context(), exe, "--engine", "cuda:0", "--cuda-driver", fakecuda.Build(t))
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
	for range 20 {
		c := fed(t, "run", "relu", "--server", address, "--dtype", "float32", "--shape", "1000000000")
		time.Sleep(time.Duration(random.IntN(20)) * time.Millisecond) // any moment will do
		require.NoError(t, c.Process.Signal(os.Kill))
		_ = c.Wait()
	}
	testkit.Eventually(t, func() bool {
		info, err := cl.Info(t.Context())
		require.NoError(t, err)
		for _, m := range info.GetModels() {
			if g := m.GetGauges(); g["pinned_used_bytes"]+g["device_blocks"] > 0 {
				return false
			}
		}
		c := info.GetCounters()
		return c["calls"]+c["sessions"]+c["memory_used_bytes"] == 0
	}, "a server without a call")
	require.NotContains(t, strings.ToLower(fmt.Sprint(server.Log.Tail())), "error")
}
