package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/harness"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

var (
	itemsPositions = flag.Int64("items.positions", 256, "measure small calls beside items of so many `positions`: 8192 for figures")
	itemsLasts     = flag.Duration("items.for", time.Second, "how `long` that lasts")
	itemsCommand   = flag.String("items.command", "", "tensorferry `binary` (default: built from this module)")
)

// longModels are of layers that take long, and what a client sends them.
var longModels = map[string]struct {
	document string
	weights  map[string]tensor.Shape
	x        tensor.Shape // -1: the positions
}{
	"attention": {
		`{"format": 2, "name": "attention", "version": "1", "layers": [{"kind": "attention", "heads": 8, "weight": "in", "out_weight": "out"}]}`,
		map[string]tensor.Shape{"in": {192, 64}, "out": {64, 64}}, tensor.Shape{1, -1, 64},
	},
	"linear": {
		`{"name": "linear", "version": "1", "layers": [{"kind": "linear", "weight": "in"}, {"kind": "gelu"}, {"kind": "linear", "weight": "out"}]}`,
		map[string]tensor.Shape{"in": {4096, 1024}, "out": {1024, 4096}}, tensor.Shape{256, 1024},
	},
}

func ones(t *testing.T, shape tensor.Shape) tensor.Tensor {
	t.Helper()
	n, err := tensor.Desc{DType: tensor.Float32, Shape: shape}.Bytes()
	require.NoError(t, err)
	values := make([]float32, n/4)
	for i := range values {
		values[i] = float32(i%7) / 64
	}
	x, err := tensor.Of(values, shape...)
	require.NoError(t, err)
	return x
}

// TestSmallCallsBesideLongItems has six clients of a server compute long items, while another
// makes small calls: none fails. How long these take is printed beside what they take at the
// same time on a server that does nothing else.
func TestSmallCallsBesideLongItems(t *testing.T) {
	testkit.Start(t)
	e := &environment{out: os.Stdout, dir: t.TempDir(), command: *itemsCommand}
	if e.command == "" {
		var err error
		e.command, err = harness.Tensorferry(t.Context(), e.dir)
		require.NoError(t, err)
	}
	args := []string{"--metrics", "off", "--engine", "cpu"}
	for name, m := range longModels {
		dir := filepath.Join(e.dir, name)
		require.NoError(t, os.Mkdir(dir, 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "model.json"), []byte(m.document), 0o600))
		var weights []tensorfile.Named
		for name, shape := range m.weights {
			weights = append(weights, tensorfile.Named{Name: name, Tensor: ones(t, shape)})
		}
		file, err := os.Create(filepath.Join(dir, "weights.safetensors"))
		require.NoError(t, err)
		require.NoError(t, errors.Join(tensorfile.WriteSafetensors(file, weights, nil), file.Close()))
		args = append(args, "--model", dir)
	}
	dial := func(address string) *client.Client {
		cl, err := client.Dial(address, client.Config{})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, cl.Close()) })
		return cl
	}
	var addresses []string
	for range 2 {
		d, err := e.serve(context.Background(), args...)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, d.Stop()) })
		addresses = append(addresses, d.address)
	}
	for name, m := range longModels {
		shape := slices.Clone(m.x)
		if i := slices.Index(shape, -1); i >= 0 {
			shape[i] = *itemsPositions
		}
		x := ones(t, shape)
		ctx, over := context.WithTimeout(t.Context(), *itemsLasts)
		var all sync.WaitGroup
		var ended atomic.Int32
		for range 6 {
			cl := dial(addresses[0])
			all.Go(func() {
				for ctx.Err() == nil {
					if _, err := cl.Compute(ctx, name, x); err == nil {
						ended.Add(1)
					}
				}
			})
		}
		took := make([][]time.Duration, 2)
		data := testkit.Bytes(30_000, 1)
		small, err := tensor.Of(data)
		require.NoError(t, err)
		for i, address := range addresses {
			cl := dial(address)
			all.Go(func() {
				for ctx.Err() == nil {
					at := time.Now()
					_, err := cl.Compute(t.Context(), "echo", small)
					if err != nil {
						t.Error(err)
						return
					}
					took[i] = append(took[i], time.Since(at))
					_ = pause(ctx, 3*time.Millisecond)
				}
			})
		}
		all.Wait()
		over()
		text := fmt.Sprintf("beside %d long calls of %s that ended:", ended.Load(), name)
		var p99 []time.Duration
		for i, whose := range []string{"busy", "idle"} {
			slices.Sort(took[i])
			p99 = append(p99, bench.Quantile(took[i], 0.99))
			text += fmt.Sprintf("  %s p50 %v p99 %v max %v (%d)", whose, bench.Quantile(took[i], 0.5).Round(10*time.Microsecond),
				p99[i].Round(10*time.Microsecond), took[i][len(took[i])-1].Round(10*time.Microsecond), len(took[i]))
		}
		t.Logf("%s: %.2f times", text, float64(p99[0])/float64(p99[1]))
	}
	require.Empty(t, e.all())
}
