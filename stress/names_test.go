package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/harness"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/stress/known"
)

var (
	namesMany    = flag.Int("names", 300, "measure pulls and pushes by name beside `how many` others: 60000 for figures")
	namesLasts   = flag.Duration("names.for", time.Second, "how `long` gets of globs last")
	namesCommand = flag.String("names.command", "", "tensorferry `binary` (default: built from this module)")
)

// crowd is what others do with a store of many names.
type crowd struct {
	t       *testing.T
	busy    *client.Client
	clients []*client.Client // by server: the busy one, one that does nothing else
}

// small is a tensor of 8 bytes.
func small(name string) client.Input { return known.Pick(1, 8).Input(name, nil) }

func (c *crowd) put(ctx context.Context, name string, n int) error {
	var r client.PushRequest
	for i := range n {
		r.Tensors = append(r.Tensors, small(fmt.Sprintf(name, i)))
	}
	_, err := c.busy.PutAll(ctx, r)
	return err
}

// globs pulls 1 024 globs at a time, of which each may match something.
func (c *crowd) globs(ctx context.Context, glob string) {
	var r client.PullRequest
	for i := range 1024 {
		r.Select = append(r.Select, client.Selection{Name: fmt.Sprintf(glob, i)})
	}
	_, _ = c.busy.Pull(ctx, r) // it may match nothing, or end with ctx
}

// beside measures pulls and pushes by name on both servers until the load has ended, and
// prints how long they took.
func (c *crowd) beside(what string, load func()) {
	ctx, over := context.WithCancel(c.t.Context())
	defer over()
	took := make([][]time.Duration, 4)
	var all sync.WaitGroup
	for i, cl := range c.clients {
		do := []func() error{
			func() error {
				_, err := cl.Pull(c.t.Context(), client.PullRequest{Select: []client.Selection{{Name: "mine/pulled"}}})
				return err
			},
			func() error {
				_, err := cl.Push(c.t.Context(), client.PushRequest{Tensors: []client.Input{small("mine/pushed")}})
				return err
			},
		}
		for j, do := range do {
			all.Go(func() {
				for ctx.Err() == nil {
					at := time.Now()
					if err := do(); err != nil {
						c.t.Error(err)
						return
					}
					took[2*j+i] = append(took[2*j+i], time.Since(at))
					_ = pause(ctx, 3*time.Millisecond)
				}
			})
		}
	}
	began := time.Now()
	load()
	over()
	all.Wait()
	for j, kind := range []string{"pull", "push"} {
		text := fmt.Sprintf("%-46s %s", fmt.Sprintf("%s, %v:", what, time.Since(began).Round(time.Second/10)), kind)
		var p99 []time.Duration
		for i, whose := range []string{"busy", "idle"} {
			list := took[2*j+i]
			if len(list) == 0 {
				c.t.Errorf("no %s has ended", kind)
				return
			}
			slices.Sort(list)
			p99 = append(p99, bench.Quantile(list, 0.99))
			text += fmt.Sprintf("  %s p50 %v p99 %v max %v (%d)", whose, bench.Quantile(list, 0.5).Round(10*time.Microsecond),
				p99[i].Round(10*time.Microsecond), list[len(list)-1].Round(10*time.Microsecond), len(list))
		}
		c.t.Logf("%s: %.2f times", text, float64(p99[0])/float64(p99[1]))
	}
}

// TestPullsAndPushesByNameBesideManyNames puts sets to a server, and has it match globs against
// all their names, while small tensors are pulled and pushed by name: none fails. How long that
// takes is printed beside what it takes at the same time on a server that does nothing else.
func TestPullsAndPushesByNameBesideManyNames(t *testing.T) {
	testkit.Start(t)
	e := &environment{out: os.Stdout, dir: t.TempDir(), command: *namesCommand}
	if e.command == "" {
		var err error
		e.command, err = harness.Tensorferry(t.Context(), e.dir)
		require.NoError(t, err)
	}
	c := &crowd{t: t}
	dial := func(address string) *client.Client {
		cl, err := client.Dial(address, client.Config{})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, cl.Close()) })
		return cl
	}
	for i := range 2 {
		d, err := e.serve(context.Background(), "--metrics", "off", "--store", fmt.Sprintf("%s/%d", e.dir, i))
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, d.Stop()) })
		c.clients = append(c.clients, dial(d.address))
		if i == 0 {
			c.busy = dial(d.address)
		}
	}
	for _, cl := range c.clients {
		_, err := cl.Push(t.Context(), client.PushRequest{Tensors: []client.Input{small("mine/pulled")}})
		require.NoError(t, err)
	}
	c.beside("nothing", func() { _ = pause(t.Context(), *namesLasts) })
	c.beside(fmt.Sprintf("a set of %d new", *namesMany), func() { require.NoError(t, c.put(t.Context(), "many/%05d", *namesMany)) })
	for what, glob := range map[string]string{"globs that match nothing, and sets": "*/*none%d", "globs that match some, and sets": "many/*%04d"} {
		c.beside(what, func() {
			ctx, over := context.WithTimeout(t.Context(), *namesLasts)
			defer over()
			var all sync.WaitGroup
			for range 4 {
				all.Go(func() {
					for ctx.Err() == nil {
						c.globs(ctx, glob)
					}
				})
			}
			for ctx.Err() == nil {
				_ = c.put(ctx, "small/%d", 2) // it may wait until ctx ends
			}
			all.Wait()
		})
	}
	c.beside(fmt.Sprintf("a set of %d that replaces others", *namesMany/2), func() { require.NoError(t, c.put(t.Context(), "many/%05d", *namesMany/2)) })
	require.Empty(t, e.all())
}
