package client_test

import (
	"bytes"
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/roads"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

// far returns a server and its client, with a road of 20 ms between them that loses packets.
func far(t *testing.T, cfg client.Config, loss float64) *fixture {
	t.Helper()
	road := roads.Start(t, roads.Link{MTU: 9000, Way: roads.Way{Delay: 10 * time.Millisecond, Rate: 400_000_000, Loss: loss}})
	l, err := road.Ends[1].Listen()
	require.NoError(t, err)
	return serveAt(t, l, l.Addr().String(), cfg.Dialling(func(ctx context.Context, _, address string) (net.Conn, error) {
		return road.Ends[0].Dial(ctx, address)
	}), func(*serverConfig) {})
}

func TestThereAreMoreLanesWhereTheServerIsFar(t *testing.T) {
	testkit.Start(t)
	f := far(t, client.Config{}, 0.0005)
	s, x := f.session(t), large(t, 32*mib, 1)
	for w := (client.Ways{}); w.Lanes < 2; w = s.Ways() {
		y, err := s.Compute(t.Context(), "echo", x)
		require.NoError(t, err)
		require.True(t, bytes.Equal(x.Data, y.Data))
		require.NotContains(t, s.Ways().Why, "one is enough")
	}
	w := s.Ways()
	require.Positive(t, w.LaneSentBytes)
	require.Positive(t, w.LaneReceivedBytes)
}

func TestAFarServerGetsSmallChunks(t *testing.T) {
	testkit.Start(t)
	x := large(t, 4*mib, 1)
	chunks := func(f *fixture, want int) {
		t.Helper()
		c, err := f.client.Call(t.Context(), client.Request{Model: "echo", Inputs: []client.Input{client.From("", x)}})
		require.NoError(t, err)
		for r, err := range c.Regions() { // of the result, which has the chunks of the input
			require.NoError(t, err)
			require.Len(t, r.Data, want)
		}
		_, err = c.Wait()
		require.NoError(t, err)
	}
	chunks(start(t, "tcp", client.Config{}), mib)
	chunks(far(t, client.Config{}, 0), 256<<10)
	chunks(far(t, client.Config{ChunkBytes: mib / 2}, 0), mib/2)
}

func TestLanesBecomeMoreWherePacketsGetLost(t *testing.T) {
	testkit.Start(t)
	f := far(t, client.Config{}, 0.02) // a lane carries about a fourteenth of the line
	s, x := f.session(t), large(t, 32*mib, 1)
	for w := (client.Ways{}); w.Lanes <= 8; w = s.Ways() {
		y, err := s.Compute(t.Context(), "echo", x)
		require.NoError(t, err)
		require.True(t, bytes.Equal(x.Data, y.Data))
	}
}

func TestAFullLineGetsNoMoreLanes(t *testing.T) {
	testkit.Start(t)
	f := far(t, client.Config{}, 0)
	s, x := f.session(t), large(t, 32*mib, 1)
	for w := (client.Ways{}); !strings.Contains(w.Why, "the line is full"); w = s.Ways() {
		y, err := s.Compute(t.Context(), "echo", x)
		require.NoError(t, err)
		require.True(t, bytes.Equal(x.Data, y.Data))
	}
	require.Less(t, s.Ways().Lanes, 64)
}

func TestAsManyLanesAsAreFixedCarryOneTensor(t *testing.T) {
	testkit.Start(t)
	f := far(t, client.Config{Lanes: 5, FixedLanes: true}, 0.0005)
	s, x := f.session(t), large(t, 32*mib, 1)
	for w := (client.Ways{}); w.Lanes < 5; w = s.Ways() {
		y, err := s.Compute(t.Context(), "echo", x)
		require.NoError(t, err)
		require.True(t, bytes.Equal(x.Data, y.Data))
	}
	require.Contains(t, s.Ways().Why, "fixed")
	info, err := f.client.Info(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 5, info.Counters["lanes"])
}
