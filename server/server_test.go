package server_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/assembler"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

const mib = 1 << 20

// fixture is a real server with the built-in models on a real socket.
type fixture struct {
	host   *cpu.Host
	models *engine.Registry
	server *server.Server
	addr   string
	lost   int64 // runs whose memory is meant to be
}

// serve starts a server that the test's end closes, and then finds empty.
func serve(t testing.TB, change func(*server.Config)) *fixture {
	t.Helper()
	return serveWithin(t, 512*mib, change)
}

// unpaced lets small frames come as fast as they can, where their rate is not the point.
func unpaced(c *server.Config) { c.ThinFrames = 1 << 30 }

// serveWithin is serve with a memory budget of its own.
func serveWithin(t testing.TB, memory int64, change func(*server.Config)) *fixture {
	t.Helper()
	host := cpu.NewHost(cpu.HostConfig{MemoryBytes: memory, Workers: 2})
	models := engine.NewRegistry()
	for _, m := range append(cpu.Builtins(host), cpu.Slow(host)) {
		require.NoError(t, models.Add(m))
	}
	cfg := server.Config{Models: models, Pool: host.Pool(), Budget: host.Budget(), Version: "test"}
	if change != nil {
		change(&cfg)
	}
	s, err := server.New(cfg)
	require.NoError(t, err)
	l := listen(t)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	f := &fixture{host: host, models: models, server: s, addr: l.Addr().String()}
	t.Cleanup(func() {
		s.Close()
		require.NoError(t, <-served)
		f.isEmpty(t)
		host.Close()
	})
	return f
}

// isEmpty waits until nothing is left of any session: no call, no budget, no slab.
func (f *fixture) isEmpty(t testing.TB) {
	t.Helper()
	testkit.Eventually(t, func() bool {
		info, err := f.server.GetServiceInfo(t.Context(), nil)
		c := info.GetCounters()
		return err == nil && c["sessions"] == 0 && f.isIdle()
	}, "the end of every session and call")
	c := f.counters(t)
	require.Equal(t, f.lost, c["runs_abandoned_total"], "runs whose memory is lost")
	require.Equal(t, c["calls_total"], c["calls_ok_total"]+c["calls_failed_total"]+c["calls_cancelled_total"], "calls that ended: %v", c)
}

// isIdle reports whether no call is open and no memory in use, but what idle
// sessions are promised.
func (f *fixture) isIdle() bool {
	info, err := f.server.GetServiceInfo(context.Background(), nil)
	if err != nil {
		return false
	}
	slabs, _ := f.host.Pool().Live()
	used, _, _ := f.host.Budget().Used()
	c := info.GetCounters()
	return c["calls"] == 0 && slabs == 0 && used <= c["sessions"]*(info.GetLimits()["allowance_bytes"]+frame.AllowanceChunks*assembler.ChunkOverhead)
}

func (f *fixture) counters(t testing.TB) map[string]int64 {
	t.Helper()
	info, err := f.server.GetServiceInfo(context.Background(), nil)
	require.NoError(t, err)
	return info.GetCounters()
}

func (f *fixture) session(t testing.TB, cfg client.Config) *client.Session {
	t.Helper()
	c, err := client.Dial(f.addr, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	s, err := c.Session(t.Context())
	require.NoError(t, err)
	return s
}

func TestEchoReturnsEveryByteForEverySize(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	s := f.session(t, client.Config{})
	for _, n := range []int{0, 1, 1024, 1025, 16383, 16384, 16385, mib - 1, mib, mib + 1, 2 * mib, 2*mib + 1, 33*mib + 5} {
		data := testkit.Bytes(n, uint64(n))
		x, err := tensor.Of(data)
		require.NoError(t, err)
		y, err := s.Compute(t.Context(), "echo", x)
		require.NoError(t, err, "%d bytes", n)
		require.Equal(t, x.Desc, y.Desc)
		require.True(t, string(data) == string(y.Data), "%d bytes", n)
	}
}

func TestAnUnknownModelIsNotFoundAndTheSessionLivesOn(t *testing.T) {
	testkit.Start(t)
	f := serve(t, nil)
	s := f.session(t, client.Config{})
	x, _ := tensor.Of([]float32{-1, 2})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	_, err := s.Compute(ctx, "nothing", x)
	require.ErrorContains(t, err, "NotFound")
	y, err := s.Compute(ctx, "relu", x)
	require.NoError(t, err)
	v, err := tensor.Slice[float32](y)
	require.NoError(t, err)
	require.Equal(t, []float32{0, 2}, v)
}
