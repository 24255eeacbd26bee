package server_test

import (
	"context"
	"math"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

// TestAServerOfOneLine is what a Go program needs at least, on both sides.
func TestAServerOfOneLine(t *testing.T) {
	testkit.Start(t)
	host := cpu.NewHost(cpu.HostConfig{})
	defer host.Close()
	port := func(name string) []engine.Port {
		return []engine.Port{{Name: name, DTypes: []tensor.DataType{tensor.Float32}, Shape: []int64{engine.Free}}}
	}
	root, err := cpu.RowFunc{
		Info: engine.Info{Name: "root", Rows: 1, Inputs: port("x"), Outputs: port("y"), Params: []engine.Param{{Name: "add", Kind: "number"}}},
		Rows: cpu.Rows(func(_ context.Context, b cpu.RowBlock, in, out [][]float32) error {
			for i, v := range in[0] {
				out[0][i] = float32(math.Sqrt(float64(v))) + float32(len(b.Params["add"]))
			}
			return nil
		}),
	}.Model(host)
	require.NoError(t, err)

	path := "unix:" + filepath.Join(t.TempDir(), "socket")
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- server.ListenAndServe(ctx, path, root) }() // ends with ctx
	c, err := client.Dial(path, client.Config{Wait: time.Minute})
	require.NoError(t, err)
	defer c.Close()
	x, err := tensor.Of([]float32{1, 4, 9})
	require.NoError(t, err)
	y, err := c.Compute(t.Context(), "root", x, map[string]string{"add": "10"})
	require.NoError(t, err)
	got, err := tensor.Slice[float32](y)
	require.NoError(t, err)
	require.Equal(t, []float32{3, 4, 5}, got)
	_, err = c.Compute(t.Context(), "root", x, map[string]string{"plus": "10"})
	require.ErrorContains(t, err, `model "root" has no param "plus"; known are add`)
	_, err = c.Compute(t.Context(), "root", x, map[string]string{"add": "z"})
	require.ErrorContains(t, err, `"add": wanted a number, got "z"`)

	call, err := c.Call(t.Context(), client.Request{Model: "root", Inputs: []client.Input{client.From("x", x)}})
	require.NoError(t, err)
	for r, err := range call.Regions() {
		require.NoError(t, err)
		got, err = tensor.Slice[float32](tensor.Tensor{Desc: r.Desc, Data: r.Data})
		require.NoError(t, err)
		require.Equal(t, []float32{1, 2, 3}, got)
	}
	_, err = call.Wait()
	require.NoError(t, err)
	stop()
	require.NoError(t, <-served)
	require.ErrorContains(t, server.ListenAndServe(t.Context(), "nowhere", root), "nowhere")
	for _, open := range []string{":0", "0.0.0.0:0", "192.0.2.1:0", "[::]:0"} {
		require.ErrorContains(t, server.ListenAndServe(t.Context(), open, root), "without encryption")
	}
	require.ErrorContains(t, server.ListenAndServe(t.Context(), path, root, root), "model exists")
}
