package main

import (
	"context"
	"encoding/binary"
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/cli/demo"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// pythonArgs are the arguments of a server of models of testdata/python.
func pythonArgs(t *testing.T, models ...string) []string {
	t.Helper()
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("there is no python3 here")
	}
	source, err := filepath.Abs("../../python/src")
	require.NoError(t, err)
	folder, err := filepath.Abs("testdata/python")
	require.NoError(t, err)
	args := []string{"--engine", "cpu", "--python-env", "PYTHONPATH=" + source + ":" + folder, "--python-env", "PYTHONDONTWRITEBYTECODE=1"}
	for _, m := range models {
		args = append(args, "--python", m)
	}
	return args
}

func pidOf(ctx context.Context, t *testing.T, cl *client.Client) int {
	t.Helper()
	x, err := tensor.Of([]uint8{1}, 1)
	require.NoError(t, err)
	y, err := cl.Compute(ctx, "pid", x)
	require.NoError(t, err)
	return int(binary.LittleEndian.Uint64(y.Data))
}

func TestWhyAPythonModelFailedCanBeHad(t *testing.T) {
	testkit.Start(t)
	address := serving(t, pythonArgs(t, "divides=served:divides", "loses=served:loses_rows")...)
	x, err := tensor.Of([]uint8{1, 2, 3, 4, 5, 6, 7}, 7)
	require.NoError(t, err)
	cl, err := client.Dial(address, client.Config{})
	require.NoError(t, err)
	defer cl.Close()
	for model, why := range map[string]string{"divides": `ZeroDivisionError: .*served.py", line \d+`, "loses": "a result is uint8.1.; the first dimension of a block of 7 rows is to be that"} {
		for range 3 {
			_, err = cl.Compute(t.Context(), model, x)
			failed, ok := errors.AsType[*client.Error](err)
			require.True(t, ok, "%v", err)
			said, err := program(t, "tensorferry", "info", "--server", address, "--call", failed.Call.String()).CombinedOutput()
			require.NoError(t, err, "%s", said)
			require.Regexp(t, why, string(said))
		}
	}
	said, err := program(t, "tensorferry", "info", "--server", address, "--failures", "--json").Output()
	require.NoError(t, err)
	require.Equal(t, 6, strings.Count(string(said), `"cause"`))
}

func TestAServerOfPythonModelsOutlivesThem(t *testing.T) {
	testkit.Start(t)
	exe, err := exec.LookPath("tensorferry")
	require.NoError(t, err)
	server, address, err := demo.Start(t.Context(), exe, pythonArgs(t, "py/echo=served:echo", "slow2=served:slow", "pid=served:pid")...)
	require.NoError(t, err)
	stop := sync.OnceFunc(func() { require.NoError(t, server.Stop()) })
	defer stop()
	cl, err := client.Dial(address, client.Config{})
	require.NoError(t, err)
	x, err := tensor.Of(testkit.Bytes(5<<20, 1), 5<<10, 1<<10)
	require.NoError(t, err)
	y, err := cl.Compute(t.Context(), "py/echo", x)
	require.NoError(t, err)
	require.Equal(t, x.Data, y.Data)
	models, err := program(t, exe, "models", "--json", "--server", address).CombinedOutput()
	require.NoError(t, err, "%s", models)
	require.Contains(t, string(models), `"parameters": "1234"`)

	for range 3 {
		pid := pidOf(t.Context(), t, cl)
		require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
		_, err = cl.Compute(t.Context(), "py/echo", x) // whether another model fails does not matter
		require.NoError(t, err)
		testkit.Eventually(t, func() bool {
			_, err := cl.Compute(t.Context(), "pid", x)
			if err != nil {
				require.Equal(t, codes.Unavailable, status.Code(err), "%v", err)
			}
			return err == nil && pidOf(t.Context(), t, cl) != pid
		}, "another process")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	call, err := cl.Call(ctx, client.Request{Model: "slow2", Params: map[string]string{"seconds": "60"}, Inputs: []client.Input{client.From("x", x)}})
	if err == nil {
		_, err = call.Wait()
	}
	require.True(t, errors.Is(err, context.DeadlineExceeded) || status.Code(err) == codes.DeadlineExceeded, "%v", err)
	require.NoError(t, cl.Close()) // a session keeps what it has reserved for its next call
	cl, err = client.Dial(address, client.Config{})
	require.NoError(t, err)
	defer cl.Close()
	testkit.Eventually(t, func() bool {
		info, err := cl.Info(t.Context())
		require.NoError(t, err)
		for _, m := range info.Models {
			g := m.Gauges
			if g["worker_input_bytes"]+g["worker_queue_blocks"] > 0 {
				return false
			}
		}
		c := info.Counters
		return c["calls"]+c["memory_used_bytes"] == 0
	}, "a server without a call")
	pid := pidOf(t.Context(), t, cl)
	stop()
	require.ErrorIs(t, syscall.Kill(pid, 0), syscall.ESRCH, "the process ends with the server")
}

func TestWorkersDieWithAServerThatIsKilled(t *testing.T) {
	testkit.Start(t)
	exe, err := exec.LookPath("tensorferry")
	require.NoError(t, err)
	server, address, err := demo.Start(t.Context(), exe, pythonArgs(t, "pid=served:pid")...)
	require.NoError(t, err)
	cl, err := client.Dial(address, client.Config{})
	require.NoError(t, err)
	pid := pidOf(t.Context(), t, cl)
	require.NoError(t, cl.Close())
	server.Kill()
	_ = server.Wait() // it was killed
	testkit.Eventually(t, func() bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) }, "the end of the worker")
}

func TestAPythonModelThatCannotBeServedSaysWhy(t *testing.T) {
	for model, want := range map[string]string{
		"served:echo":     "use name=module:function",
		"m=served":        "use name=module:function",
		"m=served:broken": "RuntimeError: no weights here",
		"m=nowhere:f":     "No module named 'nowhere'",
		"echo=served:pid": `a model "echo" already exists`,

		"m=served:pid,blocks=h.4":     "use blocks=FIRST:END",
		"m=served:pid,blocks=h.4:h.8": "blocks=h.4:h.8 are those of a torch.nn.Module, not of a function",
	} {
		t.Run(model, func(t *testing.T) {
			args := append([]string{"serve", "--child", "--listen", "127.0.0.1:0"}, pythonArgs(t, model)...)
			out, err := program(t, "tensorferry", args...).CombinedOutput()
			require.Error(t, err)
			require.Contains(t, strings.TrimSpace(string(out)), want)
		})
	}
}
