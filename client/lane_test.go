package client_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"weak"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/lane"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

func large(t testing.TB, n int, seed uint64) tensor.Tensor {
	t.Helper()
	x, err := tensor.Of(testkit.Bytes(n, seed), int64(n))
	require.NoError(t, err)
	return x
}

func TestLargeTensorsGoByALane(t *testing.T) {
	testkit.Start(t)
	for _, network := range []string{"tcp", "unix"} {
		for _, kind := range []codec.Checksum{codec.CRC32C, codec.CRC32} {
			t.Run(fmt.Sprint(network, " ", kind), func(t *testing.T) {
				testkit.Start(t)
				f := start(t, network, client.Config{Checksum: kind})
				s := f.session(t)
				for _, n := range []int{16 * mib, 5*mib + 1, 4 * mib} {
					x := large(t, n, uint64(n))
					for w := (client.Ways{}); w.LaneSentBytes == 0; w = s.Ways() { // it is opened beside the first call
						y, err := s.Compute(t.Context(), "echo", x)
						require.NoError(t, err)
						require.True(t, bytes.Equal(x.Data, y.Data))
					}
				}
				w := s.Ways()
				require.True(t, w.Lane)
				require.Empty(t, w.Why)
				require.Positive(t, w.LaneReceivedBytes)
				info, err := f.client.Info(t.Context())
				require.NoError(t, err)
				require.EqualValues(t, 1, info.GetCounters()["lanes"])
				require.EqualValues(t, 1, info.GetCounters()["lanes_opened_total"])
				require.Equal(t, w.LaneSentBytes, info.GetCounters()["lane_received_bytes_total"])
				require.Equal(t, w.LaneReceivedBytes, info.GetCounters()["lane_sent_bytes_total"])
				require.NoError(t, s.Close())
				testkit.Eventually(t, func() bool {
					info, err := f.client.Info(t.Context())
					return err == nil && info.GetCounters()["lanes"] == 0
				}, "the lane ends with its session")
			})
		}
	}
}

func TestWithoutALaneTheSessionCarriesAllAndSaysWhy(t *testing.T) {
	testkit.Start(t)
	for name, tc := range map[string]struct {
		client client.Config
		server int
		bytes  int
		why    string
	}{
		"turned off by the client":     {client.Config{Lanes: -1}, 0, 8 * mib, "Config.Lanes"},
		"turned off by the server":     {client.Config{}, -1, 8 * mib, "the server offers none"},
		"compressed":                   {client.Config{Codec: codec.LZ4}, 0, 8 * mib, "compressed"},
		"small":                        {client.Config{}, 0, 2 * mib, "large enough"},
		"credentials that encrypt not": {client.Config{Credentials: insecure.NewCredentials()}, -1, 8 * mib, "the server offers none"},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			f := startServer(t, "tcp", tc.client, func(c *serverConfig) { c.Lanes = tc.server })
			x := large(t, tc.bytes, 1)
			require.Zero(t, f.client.Ways())
			for range 2 {
				y, err := f.client.Compute(t.Context(), "echo", x)
				require.NoError(t, err)
				require.True(t, bytes.Equal(x.Data, y.Data))
			}
			w := f.client.Ways()
			require.Contains(t, w.Why, tc.why)
			require.False(t, w.Lane)
			require.Zero(t, w.LaneSentBytes+w.LaneReceivedBytes)
			require.EqualValues(t, 2*tc.bytes, w.SentBytes)
		})
	}
}

// between is what stands between clients and servers. A lane goes through what is chosen
// for it.
type between struct {
	addr   string
	lanes  atomic.Int64
	choose func(client, server net.Conn) // carries a lane to its end
	to     func(isLane bool) string

	mu    sync.Mutex
	conns []net.Conn // guarded by mu
	work  sync.WaitGroup
}

func newBetween(t *testing.T, to func(isLane bool) string, choose func(client, server net.Conn)) *between {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	b := &between{addr: l.Addr().String(), to: to, choose: choose}
	b.work.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			b.work.Go(func() { b.carry(c) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		b.mu.Lock()
		for _, c := range b.conns {
			_ = c.Close()
		}
		b.mu.Unlock()
		b.work.Wait()
	})
	return b
}

func (b *between) carry(c net.Conn) {
	defer c.Close()
	first := make([]byte, len(lane.Magic))
	if _, err := io.ReadFull(c, first); err != nil {
		return
	}
	isLane := string(first) == lane.Magic
	s, err := net.Dial("tcp", b.to(isLane))
	if err != nil {
		return
	}
	defer s.Close()
	b.mu.Lock()
	b.conns = append(b.conns, c, s)
	b.mu.Unlock()
	if _, err := s.Write(first); err != nil {
		return
	}
	if isLane {
		b.lanes.Add(1)
		b.choose(c, s)
		return
	}
	both(c, s)
}

// both carries bytes both ways until either end is gone.
func both(a, b net.Conn) {
	var work sync.WaitGroup
	for _, way := range [][2]net.Conn{{a, b}, {b, a}} {
		work.Go(func() {
			_, _ = io.Copy(way[0], way[1])
			_ = a.Close()
			_ = b.Close()
		})
	}
	work.Wait()
}

func TestBehindABalancerTheSessionCarriesAllAndSaysWhy(t *testing.T) {
	testkit.Start(t)
	f, other := start(t, "tcp", client.Config{}), start(t, "tcp", client.Config{})
	b := newBetween(t, func(isLane bool) string {
		if isLane {
			return other.addr
		}
		return f.addr
	}, both)
	c, err := client.Dial(b.addr, client.Config{})
	require.NoError(t, err)
	x := large(t, 8*mib, 1)
	for range 3 {
		s, err := c.Session(t.Context())
		require.NoError(t, err)
		testkit.Eventually(t, func() bool {
			y, err := s.Compute(t.Context(), "echo", x)
			return err == nil && bytes.Equal(x.Data, y.Data) && s.Ways().Why != "it is being opened"
		}, "the lane was refused")
		require.Contains(t, s.Ways().Why, "balancer")
		require.Zero(t, s.Ways().LaneSentBytes)
		require.NoError(t, s.Close())
	}
	require.EqualValues(t, 3, b.lanes.Load(), "three tries, and no more for ten minutes")
	require.NoError(t, c.Close())
	info, err := other.client.Info(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 3, info.GetCounters()["lanes_refused_total"])
}

func TestASilentLaneIsNotWaitedFor(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	b := newBetween(t, func(bool) string { return f.addr }, func(c, _ net.Conn) { _, _ = io.Copy(io.Discard, c) })
	c, err := client.Dial(b.addr, client.Config{})
	require.NoError(t, err)
	x := large(t, 8*mib, 1)
	testkit.Eventually(t, func() bool {
		y, err := c.Compute(t.Context(), "echo", x)
		return err == nil && bytes.Equal(x.Data, y.Data) && c.Ways().Why != "it is being opened"
	}, "the client has given up")
	require.Contains(t, c.Ways().Why, "no answer of a lane")
	require.NoError(t, c.Close())
}

// faults are what may happen to a lane, after so many bytes of one direction.
var faults = []struct {
	name string
	run  func(r *rand.Rand, c, s net.Conn, after int64)
}{
	{"cut", func(_ *rand.Rand, c, s net.Conn, after int64) {
		one(c, s, func() { _, _ = io.CopyN(s, c, after) })
	}},
	{"cut backwards", func(_ *rand.Rand, c, s net.Conn, after int64) {
		one(s, c, func() { _, _ = io.CopyN(c, s, after) })
	}},
	{"reset", func(_ *rand.Rand, c, s net.Conn, after int64) {
		one(c, s, func() {
			_, _ = io.CopyN(s, c, after)
			_ = s.(*net.TCPConn).SetLinger(0)
		})
	}},
	{"half closed", func(_ *rand.Rand, c, s net.Conn, after int64) {
		one(c, s, func() {
			_, _ = io.CopyN(s, c, after)
			_ = s.(*net.TCPConn).CloseWrite()
			_, _ = io.Copy(io.Discard, c)
		})
	}},
	{"damaged", func(r *rand.Rand, c, s net.Conn, after int64) {
		one(c, s, func() { damage(r, s, c, after) })
	}},
	{"damaged backwards", func(r *rand.Rand, c, s net.Conn, after int64) {
		one(s, c, func() { damage(r, c, s, after) })
	}},
	{"a header damaged", func(r *rand.Rand, c, s net.Conn, after int64) {
		const greeting, chunk = 40, 40 + mib // the rest of one; chunks have 1 MiB but for the last of a tensor
		one(c, s, func() { damage(r, s, c, greeting+after/chunk*chunk+r.Int64N(40)) })
	}},
	{"slowed", func(_ *rand.Rand, c, s net.Conn, after int64) {
		one(c, s, func() {
			_, _ = io.CopyN(s, c, after)
			tick := time.NewTicker(20 * time.Millisecond) // 3 MB/s
			defer tick.Stop()
			for range 20 {
				<-tick.C
				if _, err := io.CopyN(s, c, 64<<10); err != nil {
					return
				}
			}
			_, _ = io.Copy(s, c)
		})
	}},
	{"stalled", func(_ *rand.Rand, c, s net.Conn, after int64) {
		one(c, s, func() {
			_, _ = io.CopyN(s, c, after)
			until(s, c) // nobody reads c
		})
	}},
	{"stalled backwards", func(_ *rand.Rand, c, s net.Conn, after int64) {
		one(s, c, func() {
			_, _ = io.CopyN(c, s, after)
			until(c, s)
		})
	}},
}

// until waits until w's peer has closed it, and reads nothing of r.
func until(w, _ net.Conn) {
	_, _ = w.Read(make([]byte, 1)) // the other direction has been read: what comes is the end
}

// one carries a lane whose fault is in the direction from a to b.
func one(a, b net.Conn, fault func()) {
	var work sync.WaitGroup
	end := func() {
		_ = a.Close()
		_ = b.Close()
	}
	work.Go(func() {
		_, _ = io.Copy(a, b)
		end()
	})
	work.Go(func() {
		fault()
		end()
	})
	work.Wait()
}

// damage carries bytes, one of which changes.
func damage(r *rand.Rand, to, from net.Conn, after int64) {
	_, err := io.CopyN(to, from, after)
	b := make([]byte, 1)
	if err == nil {
		_, err = io.ReadFull(from, b)
	}
	b[0] ^= 1 << r.IntN(8)
	if err == nil {
		_, err = to.Write(b)
	}
	if err == nil {
		_, _ = io.Copy(to, from)
	}
}

var laneFaults = flag.Int("lane.faults", 40, "how many lanes TestFaultsOfLanesCostNoCall has fail")

func TestFaultsOfLanesCostNoCall(t *testing.T) {
	testkit.Start(t)
	const workers = 4
	var happened atomic.Int64
	f := start(t, "tcp", client.Config{})
	b := newBetween(t, func(bool) string { return f.addr }, func(c, s net.Conn) {
		n := happened.Add(1)
		r := rand.New(rand.NewPCG(uint64(n), 0))
		what := faults[n%int64(len(faults))]
		if n%37 > 0 { // 5 s of patience each
			what = faults[n%int64(len(faults)-2)]
		}
		what.run(r, c, s, r.Int64N(12*mib))
	})
	var work sync.WaitGroup
	for i := range workers {
		work.Go(func() {
			w := &laneWorker{t: t, addr: b.addr, rand: rand.New(rand.NewPCG(uint64(i), 1)), gone: make([]byte, 12*mib)}
			w.take()
			for happened.Load() < int64(*laneFaults) && !t.Failed() {
				if err := w.session(t.Context()); err != nil {
					t.Errorf("worker %d: %v", i, err)
				}
			}
		})
	}
	work.Wait()
	t.Logf("%d lanes failed", happened.Load())
}

// laneWorker makes calls of large tensors, whose results must be right.
type laneWorker struct {
	t    *testing.T
	addr string
	rand *rand.Rand
	gone []byte // memory of calls that were cancelled: it must not change
}

// take notes what is in the memory that was lent.
func (w *laneWorker) take() {
	for i := range w.gone {
		w.gone[i] = 0xdb
	}
}

func (w *laneWorker) session(ctx context.Context) error {
	c, err := client.Dial(w.addr, client.Config{Checksum: codec.Checksum(1 + w.rand.IntN(2))})
	if err != nil {
		return err
	}
	s, err := c.Session(ctx)
	if err != nil {
		return errors.Join(err, c.Close())
	}
	for range 12 {
		if err == nil {
			err = w.call(ctx, s)
		}
	}
	if w.rand.IntN(2) == 0 {
		err = errors.Join(err, s.Close())
	}
	return errors.Join(err, c.Close())
}

func (w *laneWorker) call(ctx context.Context, s *client.Session) error {
	x := large(w.t, 4*mib+w.rand.IntN(8*mib), w.rand.Uint64())
	n := len(x.Data)
	cancelled := w.rand.IntN(3) == 0
	into := make([]byte, n)
	if cancelled {
		into = w.gone[:n]
	}
	call, err := s.Call(ctx, client.Request{Model: "echo", Inputs: []client.Input{client.From("", x)}, Results: map[string]client.Sink{"y": client.Into(into)}})
	if err != nil {
		return err
	}
	if cancelled {
		for range w.rand.IntN(12) {
			for _, err := range call.Regions() {
				if err != nil {
					break
				}
				break
			}
		}
		call.Cancel()
	}
	_, err = call.Wait()
	switch {
	case cancelled:
		clear(x.Data) // the race detector sees who still reads it
		w.take()
		err = w.small(ctx, s)
		for i := range w.gone {
			if w.gone[i] != 0xdb {
				return fmt.Errorf("byte %d of memory that was taken back has been written", i)
			}
		}
		return err
	case err != nil:
		return err
	case !bytes.Equal(into, x.Data):
		return errors.New("the result is wrong")
	}
	return nil
}

func (w *laneWorker) small(ctx context.Context, s *client.Session) error {
	x := large(w.t, 30_000, w.rand.Uint64())
	y, err := s.Compute(ctx, "echo", x)
	if err == nil && !bytes.Equal(x.Data, y.Data) {
		err = errors.New("the result of a small call is wrong")
	}
	return err
}

func TestClosingSessionsInMidOpeningLeavesLanesOn(t *testing.T) {
	testkit.Start(t)
	f, x := start(t, "tcp", client.Config{}), large(t, 8*mib, 1)
	for i := range 40 {
		s := f.session(t)
		call, err := s.Call(t.Context(), client.Request{Model: "echo", Inputs: []client.Input{client.From("", x)}})
		require.NoError(t, err)
		for range i % 4 { // a little later each time
			_ = s.Ways()
		}
		require.NoError(t, s.Close())
		_, _ = call.Wait()
	}
	s := f.session(t)
	testkit.Eventually(t, func() bool {
		_, err := s.Compute(t.Context(), "echo", x)
		return err == nil && s.Ways().Lane
	}, "a lane")
}

func TestClosingWaitsForNoGreeting(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	greeted := make(chan struct{})
	b := newBetween(t, func(bool) string { return f.addr }, func(c, _ net.Conn) {
		close(greeted)
		_, _ = io.Copy(io.Discard, c) // ends with the client
	})
	c, err := client.Dial(b.addr, client.Config{})
	require.NoError(t, err)
	_, err = c.Compute(t.Context(), "echo", large(t, 4*mib, 1))
	require.NoError(t, err)
	<-greeted
	require.NoError(t, c.Close())
	require.Contains(t, c.Ways().Why, "closed", "it was not waited for")
}

func TestAnIdleLaneKeepsNoTensor(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	s := f.session(t)
	once := func() weak.Pointer[byte] {
		x := large(t, 16*mib, 1)
		_, err := s.Compute(t.Context(), "echo", x)
		require.NoError(t, err)
		return weak.Make(&x.Data[0])
	}
	testkit.Eventually(t, func() bool {
		once()
		return s.Ways().Lane
	}, "a lane")
	p := once()
	testkit.Eventually(t, func() bool {
		runtime.GC()
		return p.Value() == nil
	}, "the input of an ended call is collected")
}

func TestAServerThatEndsItsLanesAtOnceIsNotDialledForEver(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	b := newBetween(t, func(bool) string { return f.addr }, func(c, s net.Conn) {
		both(c, &limited{Conn: s, left: 8}) // the answer, and no more
	})
	c, err := client.Dial(b.addr, client.Config{})
	require.NoError(t, err)
	x := large(t, 8*mib, 1)
	testkit.Eventually(t, func() bool {
		y, err := c.Compute(t.Context(), "echo", x)
		return err == nil && bytes.Equal(x.Data, y.Data) && strings.HasPrefix(c.Ways().Why, "none for 10m0s")
	}, "the client has had enough")
	require.EqualValues(t, 3, b.lanes.Load())
	require.NoError(t, c.Close())
}

// limited is a connection of which so many bytes can be read.
type limited struct {
	net.Conn
	left int
}

func (l *limited) Read(p []byte) (int, error) {
	if l.left == 0 {
		return 0, io.EOF
	}
	n, err := l.Conn.Read(p[:min(len(p), l.left)])
	l.left -= n
	return n, err
}
