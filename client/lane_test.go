package client_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"os"
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
				require.Equal(t, 1, w.Lanes)
				require.Contains(t, w.Why, "less than 1 ms away")
				require.Positive(t, w.LaneReceivedBytes)
				info, err := f.client.Info(t.Context())
				require.NoError(t, err)
				require.EqualValues(t, 1, info.Counters["lanes"])
				require.EqualValues(t, 1, info.Counters["lanes_opened_total"])
				require.Equal(t, w.LaneSentBytes, info.Counters["lane_received_bytes_total"])
				require.Equal(t, w.LaneReceivedBytes, info.Counters["lane_sent_bytes_total"])
				require.NoError(t, s.Close())
				testkit.Eventually(t, func() bool {
					info, err := f.client.Info(t.Context())
					return err == nil && info.Counters["lanes"] == 0
				}, "the lane ends with its session")
			})
		}
	}
}

func TestALaneIsDialledByThePathThatTheClientKnows(t *testing.T) {
	testkit.Start(t)
	f := start(t, "unix", client.Config{})
	bound, dir := strings.TrimPrefix(f.addr, "unix:"), t.TempDir()
	require.NoError(t, os.Rename(bound, dir+"/moved here"))
	t.Chdir(dir)
	for _, target := range []string{"unix:moved here", "unix:" + dir + "/moved%20here", "unix://" + dir + "/moved here"} {
		c, err := client.Dial(target, client.Config{})
		require.NoError(t, err)
		x := large(t, 4*mib, 1)
		testkit.Eventually(t, func() bool {
			_, err := c.Compute(t.Context(), "echo", x)
			require.NoError(t, err)
			return c.Ways().Lanes > 0
		}, "a lane")
		require.NoError(t, c.Close())
	}
}

// A progress line that asked for Ways while a release waited for the line stood still for ever.
func TestAReleaseMayAskForTheLanes(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	s, x, asked := f.session(t), large(t, 8*mib, 1), atomic.Int64{}
	rest := x.Data
	in := client.Input{Desc: x.Desc, Next: func(<-chan struct{}) ([]byte, func(), error) {
		piece := rest[:mib]
		rest = rest[mib:]
		return piece, func() { asked.Add(1 + int64(min(s.Lanes(), 0))) }, nil
	}}
	c, err := s.Call(t.Context(), client.Request{Model: "echo", Inputs: []client.Input{in}})
	require.NoError(t, err)
	_, err = c.Wait()
	require.NoError(t, err)
	require.EqualValues(t, 8, asked.Load())
	testkit.Eventually(t, func() bool { return s.Lanes() == s.Ways().Lanes && s.Lanes() == 1 }, "the lane")
}

func TestAUnixSocketNeedsNoBBR(t *testing.T) {
	testkit.Start(t)
	f := start(t, "unix", client.Config{BBR: true})
	_, err := f.client.Models(t.Context())
	require.NoError(t, err)
}

func TestWithoutALaneTheSessionCarriesAllAndSaysWhy(t *testing.T) {
	testkit.Start(t)
	for name, tc := range map[string]struct {
		client client.Config
		server int
		bytes  int
		why    string
	}{
		"turned off by the client":     {client.Config{Lanes: -1}, 0, 8 * mib, "turned off"},
		"turned off by the server":     {client.Config{}, -1, 8 * mib, "the server offers none"},
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
			require.Zero(t, w.Lanes)
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
	keys   *laneKeys // nil: nothing is encrypted

	mu     sync.Mutex
	conns  []net.Conn // guarded by mu
	work   sync.WaitGroup
	closed func()
}

func newBetween(t *testing.T, to func(isLane bool) string, choose func(client, server net.Conn)) *between {
	t.Helper()
	return newBetweenWith(t, nil, to, choose)
}

// newBetweenWith is like newBetween, inside TLS: it is the server to clients, with its
// certificate, and the client to servers.
func newBetweenWith(t *testing.T, keys *laneKeys, to func(isLane bool) string, choose func(client, server net.Conn)) *between {
	t.Helper()
	l := listen(t)
	b := &between{addr: l.Addr().String(), to: to, choose: choose, keys: keys}
	b.work.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			b.work.Go(func() { b.carry(c) })
		}
	})
	b.closed = sync.OnceFunc(func() {
		_ = l.Close()
		b.mu.Lock()
		for _, c := range b.conns {
			_ = c.Close()
		}
		b.mu.Unlock()
		b.work.Wait()
	})
	t.Cleanup(b.closed)
	return b
}

func (b *between) carry(c net.Conn) {
	b.holds(c)
	if b.keys != nil {
		c = b.keys.meet(c)
	}
	defer hangUp(c)
	first := make([]byte, len(lane.Magic))
	if _, err := io.ReadFull(c, first); err != nil {
		return
	}
	isLane := string(first) == lane.Magic
	s, err := b.reach(b.to(isLane), b.keys.pairOf(leafOf(c)))
	if err != nil {
		return
	}
	defer hangUp(s)
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

// holds has a connection end with b.
func (b *between) holds(c net.Conn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.conns = append(b.conns, c)
}

// reach connects to a server, as a client with the certificate of pair.
func (b *between) reach(addr string, pair *tls.Certificate) (net.Conn, error) {
	c, err := connect(addr)
	if err != nil {
		return nil, err
	}
	b.holds(c)
	if b.keys != nil {
		c = b.keys.secure(c, pair)
	}
	return c, nil
}

// both carries bytes both ways until either end is gone.
func both(a, b net.Conn) { carryBoth(a, b) }

// carryBoth is like both, and returns how many bytes it has carried.
func carryBoth(a, b net.Conn) int64 {
	var work sync.WaitGroup
	var carried atomic.Int64
	for _, way := range [][2]net.Conn{{a, b}, {b, a}} {
		work.Go(func() {
			n, _ := io.Copy(way[0], way[1])
			carried.Add(n)
			hangUp(a)
			hangUp(b)
		})
	}
	work.Wait()
	return carried.Load()
}

// echoed computes over a large tensor, and waits until the lane that it wants is there or
// is not: a further call would only want it again.
func echoed(t *testing.T, by interface {
	Compute(ctx context.Context, model string, x tensor.Tensor, params ...map[string]string) (tensor.Tensor, error)
	Ways() client.Ways
}, x tensor.Tensor,
) {
	t.Helper()
	y, err := by.Compute(t.Context(), "echo", x)
	require.NoError(t, err)
	require.True(t, bytes.Equal(x.Data, y.Data))
	testkit.Eventually(t, func() bool { return by.Ways().Why != "it is being opened" }, "an attempt to open a lane")
}

func TestBehindABalancerTheSessionCarriesAllAndSaysWhy(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f, other := start(t, "tcp", client.Config{}), start(t, "tcp", client.Config{})
		b := newBetween(t, func(isLane bool) string {
			if isLane {
				return other.addr
			}
			return f.addr
		}, both)
		c, err := dial(b.addr, client.Config{})
		require.NoError(t, err)
		x := large(t, 8*mib, 1)
		tries := int64(0)
		for i := range 3 {
			s, err := c.Session(t.Context())
			require.NoError(t, err)
			testkit.Eventually(t, func() bool {
				echoed(t, s, x)
				return strings.HasPrefix(s.Ways().Why, "none for 10m0s")
			}, "the client gives up lanes")
			require.Contains(t, s.Ways().Why, "balancer")
			require.Zero(t, s.Ways().LaneSentBytes)
			require.NoError(t, s.Close())
			if i == 0 {
				tries = b.lanes.Load() // three, and those whose answer came too late, which do not count
				require.GreaterOrEqual(t, tries, int64(3))
			}
		}
		require.Equal(t, tries, b.lanes.Load(), "and no more for ten minutes")
		require.NoError(t, c.Close())
		info, err := other.client.Info(t.Context())
		require.NoError(t, err)
		require.GreaterOrEqual(t, info.Counters["lanes_refused_total"], int64(3))
	})
}

func TestASilentLaneIsNotWaitedFor(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := start(t, "tcp", client.Config{})
		b := newBetween(t, func(bool) string { return f.addr }, func(c, _ net.Conn) { _, _ = io.Copy(io.Discard, c) })
		c, err := dial(b.addr, client.Config{})
		require.NoError(t, err)
		x := large(t, 8*mib, 1)
		testkit.Eventually(t, func() bool {
			echoed(t, c, x)
			return strings.Contains(c.Ways().Why, "no answer to the greeting")
		}, "the client has given up")
		require.NoError(t, c.Close())
	})
}

func TestAProxyThatClosesLanesAtTheGreetingIsNotDialledForEver(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := start(t, "tcp", client.Config{})
		b := newBetween(t, func(bool) string { return f.addr }, func(_, _ net.Conn) {})
		c, err := dial(b.addr, client.Config{})
		require.NoError(t, err)
		defer c.Close()
		x := large(t, 8*mib, 1)
		for range 20 {
			echoed(t, c, x)
		}
		require.True(t, strings.HasPrefix(c.Ways().Why, "none for 10m0s"), c.Ways().Why)
		require.Contains(t, c.Ways().Why, "no answer to the greeting")
	})
}

// TestLanesThatSwallowBytesCostNoCall goes through something that opens lanes, and then reads
// what they carry and passes nothing on.
func TestLanesThatSwallowBytesCostNoCall(t *testing.T) {
	testkit.Start(t)
	for _, lanes := range []int{1, 2, 4, 16} {
		for _, side := range []string{"the client's", "the server's", "both"} {
			t.Run(fmt.Sprint(side, " ", lanes), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					f := start(t, "tcp", client.Config{})
					b := newBetween(t, func(bool) string { return f.addr }, func(c, s net.Conn) {
						_, _ = io.CopyN(s, c, 40)
						_, _ = io.CopyN(c, s, 8)
						both(swallows{c, side != "the server's"}, swallows{s, side != "the client's"})
					})
					c, err := dial(b.addr, client.Config{Lanes: lanes, FixedLanes: true})
					require.NoError(t, err)
					defer c.Close()
					x := large(t, 32*mib, 1)
					begun := time.Now()
					for range 3 {
						echoed(t, c, x)
					}
					require.Less(t, time.Since(begun), 40*time.Second, "by the clock of the test") // laneTries, 10 s each
				})
			})
		}
	}
}

// swallows is a connection of which, if so, nothing comes.
type swallows struct {
	net.Conn
	all bool
}

func (s swallows) Read(p []byte) (int, error) {
	for {
		n, err := s.Conn.Read(p)
		if err != nil || !s.all {
			return n, err
		}
	}
}

func TestALaneThatTheServerHasNoRoomForIsTriedAgainAndAgain(t *testing.T) {
	testkit.Start(t)
	f := startServer(t, "tcp", client.Config{}, func(c *serverConfig) { c.Connections = 4 })
	s, x := f.session(t), large(t, 4*mib, 1)
	var others []*client.Client
	for range 2 {
		c, err := client.Dial(f.addr, client.Config{})
		require.NoError(t, err)
		others = append(others, c)
		_, err = c.Info(t.Context())
		require.NoError(t, err)
	}
	for refused := int64(0); refused <= lane.Uses; { // more often than a token opens lanes
		before := refused
		ctx, cancel := context.WithCancel(t.Context())
		call, err := s.Call(ctx, client.Request{Model: "echo", Inputs: []client.Input{client.From("", x)}})
		require.NoError(t, err)
		cancel() // a lane has been asked for, which is enough
		_, _ = call.Wait()
		testkit.Eventually(t, func() bool {
			info, err := others[0].Info(t.Context())
			require.NoError(t, err)
			refused = info.Counters["lanes_refused_total"]
			return refused > before && strings.Contains(s.Ways().Why, "no connections to spare")
		}, "it is refused again")
	}
	for _, c := range others {
		require.NoError(t, c.Close())
	}
	testkit.Eventually(t, func() bool {
		_, err := s.Compute(t.Context(), "echo", x)
		return err == nil && s.Ways().Lanes > 0
	}, "there is room now")
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
		return err == nil && s.Ways().Lanes > 0
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
	c, err := dial(b.addr, client.Config{})
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
		return s.Ways().Lanes > 0
	}, "a lane")
	p := once()
	testkit.Eventually(t, func() bool {
		runtime.GC()
		return p.Value() == nil
	}, "the input of an ended call is collected")
}

func TestAServerThatEndsItsLanesAtOnceIsNotDialledForEver(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		f := start(t, "tcp", client.Config{})
		b := newBetween(t, func(bool) string { return f.addr }, func(c, s net.Conn) {
			both(c, &limited{Conn: s, left: 8}) // the answer, and no more
		})
		c, err := dial(b.addr, client.Config{})
		require.NoError(t, err)
		x := large(t, 8*mib, 1)
		testkit.Eventually(t, func() bool {
			echoed(t, c, x)
			return strings.HasPrefix(c.Ways().Why, "none for 10m0s")
		}, "the client has had enough")
		tries := b.lanes.Load() // three, and those whose answer came too late, which do not count
		require.GreaterOrEqual(t, tries, int64(3))
		for range 3 {
			_, err := c.Compute(t.Context(), "echo", x)
			require.NoError(t, err)
		}
		require.Equal(t, tries, b.lanes.Load(), "and no more for ten minutes")
		require.NoError(t, c.Close())
	})
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
