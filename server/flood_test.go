package server_test

import (
	"context"
	"flag"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/attack"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/store/storetest"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// floodAll runs all attacks, not those alone that differ most: make floods.
var floodAll = flag.Bool("flood.all", false, "run all floods")

// floodsOften are those that run without a flag: of what is announced, read and decoded.
var floodsOften = []string{"sessions that announce and never send", "pulls that nobody reads", "large requests"}

const (
	floodMemory = 64 * mib // the server's budget
	floodStore  = 64 * mib
	floodTensor = 16 * mib // what lies in the store to be pulled
	floodIdle   = 500 * time.Millisecond
	// floodShare is the part of an attack's connections that there are: one of so many.
	floodShare = 8
)

// TestAHealthyClientIsServedThroughAFlood attacks a server while a client makes small
// calls: none fails, memory stays within the budget, and nothing is left. How long
// they take is measured by make stress-receive.
func TestAHealthyClientIsServedThroughAFlood(t *testing.T) {
	testkit.Start(t)
	for _, a := range attack.All {
		if !*floodAll && !slices.Contains(floodsOften, a.Name) {
			continue
		}
		t.Run(a.Name, func(t *testing.T) {
			testkit.Start(t)
			m := shelf(t, floodStore)
			storetest.Put(t, m, attack.Stored, make([]byte, floodTensor))
			var cfg client.Config
			f := serveWithin(t, floodMemory, func(c *server.Config) {
				c.Store = m
				c.Session.FirstFrame, c.Session.ChunkIdle = stream.Instant(floodIdle), stream.Instant(floodIdle)
				if a.Name == attack.Handshakes {
					dir, id := newIdentity(t)
					c.Credentials, c.Identify = id.Credentials(), id.Principal
					cfg = secured{dir: dir}.config(t, true)
				}
			})
			s := f.session(t, cfg)
			x, err := tensor.Of(testkit.Bytes(1024, 1))
			require.NoError(t, err)
			// served makes small calls for a while.
			served := func(calls int) {
				t.Helper()
				for began := time.Now(); calls > 0 && time.Since(began) < 2*time.Second; calls-- {
					y, err := s.Compute(t.Context(), "echo", x)
					require.NoError(t, err, "a healthy client's call")
					require.Equal(t, x.Data, y.Data)
				}
			}
			served(200) // warm
			goroutines := runtime.NumGoroutine()
			ctx, end := context.WithCancel(t.Context())
			over := make(chan struct{})
			go func() { a.Run(ctx, f.addr, floodShare); close(over) }()
			served(1 << 20)
			end()
			testkit.Receive(t, over)
			c := f.counters(t)
			require.LessOrEqual(t, c["memory_peak_bytes"], c["memory_limit_bytes"])
			used, limit := m.Used()
			require.LessOrEqual(t, used, limit)
			testkit.Eventually(t, func() bool {
				c := f.counters(t)
				return c["sessions"] == 1 && c["open_transfers"] == 0 && f.isIdle()
			}, "the end of the flood's sessions and transfers")
			testkit.Eventually(t, func() bool { return runtime.NumGoroutine() <= goroutines+8 }, "the end of the flood's goroutines")
			r, err := m.Open(t.Context(), attack.Stored)
			require.NoError(t, err)
			r.Release()
			served(10) // and still
			require.Zero(t, f.counters(t)["panics_total"])
		})
	}
}
