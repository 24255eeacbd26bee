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
	"github.com/tensorferry/tensorferry/stress/known"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

var (
	besideMany      = flag.Int("names", 300, "measure pulls and pushes by name beside `how many` others: 60000 for figures")
	besidePositions = flag.Int64("items.positions", 256, "measure small calls beside items of so many `positions`: 8192 for figures")
	besideLasts     = flag.Duration("beside.for", time.Second, "how `long` each load lasts")
	besideCommand   = flag.String("command", "", "tensorferry `binary` (default: built from this tree)")
)

// neighbors are two servers: what somebody does on the busy one is measured beside the same
// on the idle one.
type neighbors struct {
	*testing.T
	environment
	addresses []string         // the busy one's, and the idle one's
	clients   []*client.Client // of each
}

func newNeighbors(t *testing.T, args func(dir string) []string) *neighbors {
	testkit.Start(t)
	n := &neighbors{T: t, environment: environment{out: os.Stdout, dir: t.TempDir(), command: *besideCommand}}
	if n.command == "" {
		var err error
		n.command, err = harness.Tensorferry(t.Context(), n.dir)
		require.NoError(t, err)
	}
	for i := range 2 {
		dir := filepath.Join(n.dir, fmt.Sprint(i))
		require.NoError(t, os.Mkdir(dir, 0o700))
		d, err := n.serve(context.Background(), append(args(dir), "--metrics", "off")...)
		require.NoError(t, err)
		t.Cleanup(func() {
			require.NoError(t, d.Stop())
			require.Empty(t, n.all())
		})
		n.addresses = append(n.addresses, d.address)
		n.clients = append(n.clients, n.dial(d.address))
	}
	return n
}

func (n *neighbors) dial(address string) *client.Client {
	c, err := client.Dial(address, client.Config{})
	require.NoError(n, err)
	n.Cleanup(func() { require.NoError(n, c.Close()) })
	return c
}

// beside does things on both servers, one after the other, until the load has ended, and
// prints how long they took.
func (n *neighbors) beside(what string, load func(), things map[string]func(*client.Client) error) {
	ctx, over := context.WithCancel(n.Context())
	defer over()
	took := make(map[string]*[2][]time.Duration)
	var all sync.WaitGroup
	for name, do := range things {
		times := new([2][]time.Duration)
		took[name] = times
		for i, c := range n.clients {
			all.Go(func() {
				for ctx.Err() == nil {
					at := time.Now()
					if err := do(c); err != nil {
						n.Error(err)
						return
					}
					times[i] = append(times[i], time.Since(at))
					_ = pause(ctx, 3*time.Millisecond)
				}
			})
		}
	}
	began := time.Now()
	load()
	over()
	all.Wait()
	for name, times := range took {
		text := fmt.Sprintf("%-46s %s", fmt.Sprintf("%s, %v:", what, time.Since(began).Round(time.Second/10)), name)
		var p99 [2]float64
		for i, whose := range []string{"busy", "idle"} {
			list := times[i]
			if len(list) == 0 {
				n.Errorf("no %s has ended", name)
				return
			}
			at := func(q float64) time.Duration { return bench.Quantile(list, q).Round(10 * time.Microsecond) }
			p99[i] = float64(at(0.99))
			text += fmt.Sprintf("  %s p50 %v p99 %v max %v (%d)", whose, at(0.5), at(0.99), at(1), len(list))
		}
		n.Logf("%s: %.2f times", text, p99[0]/p99[1])
	}
}

// small is a tensor of 8 bytes.
func small(name string) client.Input { return known.Pick(1, 8).Input(name, nil) }

func put(ctx context.Context, c *client.Client, name string, n int) error {
	var r client.PushRequest
	for i := range n {
		r.Tensors = append(r.Tensors, small(fmt.Sprintf(name, i)))
	}
	_, err := c.PutAll(ctx, r)
	return err
}

// pullGlobs pulls 1 024 globs at a time, of which each may match something.
func pullGlobs(ctx context.Context, c *client.Client, glob string) {
	var r client.PullRequest
	for i := range 1024 {
		r.Select = append(r.Select, client.Selection{Name: fmt.Sprintf(glob, i)})
	}
	_, _ = c.Pull(ctx, r) // it may match nothing, or end with ctx
}

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

// TestPullsAndPushesByNameBesideManyNames puts sets to a server, and has it match globs against
// all their names, while small tensors are pulled and pushed by name: none fails. How long that
// takes is printed beside what it takes at the same time on a server that does nothing else.
func TestPullsAndPushesByNameBesideManyNames(t *testing.T) {
	n := newNeighbors(t, func(dir string) []string { return []string{"--store", dir} })
	push := func(name string) func(*client.Client) error {
		return func(c *client.Client) error {
			_, err := c.Push(t.Context(), client.PushRequest{Tensors: []client.Input{small(name)}})
			return err
		}
	}
	for _, c := range n.clients {
		require.NoError(t, push("mine/pulled")(c))
	}
	things := map[string]func(*client.Client) error{
		"push": push("mine/pushed"),
		"pull": func(c *client.Client) error {
			_, err := c.Pull(t.Context(), client.PullRequest{Select: []client.Selection{{Name: "mine/pulled"}}})
			return err
		},
	}
	busy := n.dial(n.addresses[0])
	n.beside("nothing", func() { _ = pause(t.Context(), *besideLasts) }, things)
	n.beside(fmt.Sprintf("a set of %d new", *besideMany), func() { require.NoError(t, put(t.Context(), busy, "many/%05d", *besideMany)) }, things)
	for what, glob := range map[string]string{"globs that match nothing, and sets": "*/*none%d", "globs that match some, and sets": "many/*%04d"} {
		n.beside(what, func() {
			ctx, over := context.WithTimeout(t.Context(), *besideLasts)
			defer over()
			var all sync.WaitGroup
			for range 4 {
				all.Go(func() {
					for ctx.Err() == nil {
						pullGlobs(ctx, busy, glob)
					}
				})
			}
			for ctx.Err() == nil {
				_ = put(ctx, busy, "small/%d", 2) // it may wait until ctx ends
			}
			all.Wait()
		}, things)
	}
	n.beside(fmt.Sprintf("a set of %d that replaces others", *besideMany/2), func() { require.NoError(t, put(t.Context(), busy, "many/%05d", *besideMany/2)) }, things)
}

// TestSmallCallsBesideLongItems has six clients of a server compute long items, while another
// makes small calls: none fails. How long these take is printed beside what they take at the
// same time on a server that does nothing else.
func TestSmallCallsBesideLongItems(t *testing.T) {
	n := newNeighbors(t, func(dir string) []string {
		args := []string{"--engine", "cpu"}
		for name, m := range longModels {
			dir := filepath.Join(dir, name)
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
		return args
	})
	x, err := tensor.Of(testkit.Bytes(30_000, 1))
	require.NoError(t, err)
	for name, m := range longModels {
		shape := slices.Clone(m.x)
		if i := slices.Index(shape, -1); i >= 0 {
			shape[i] = *besidePositions
		}
		long := ones(t, shape)
		var ended atomic.Int32
		n.beside("long calls of "+name, func() {
			ctx, over := context.WithTimeout(t.Context(), *besideLasts)
			defer over()
			var all sync.WaitGroup
			for range 6 {
				c := n.dial(n.addresses[0])
				all.Go(func() {
					for ctx.Err() == nil {
						if _, err := c.Compute(ctx, name, long); err == nil {
							ended.Add(1)
						}
					}
				})
			}
			all.Wait()
		}, map[string]func(*client.Client) error{"call": func(c *client.Client) error {
			_, err := c.Compute(t.Context(), "echo", x)
			return err
		}})
		t.Logf("%d long calls ended", ended.Load())
	}
}
