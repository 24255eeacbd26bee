package server_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/store/storetest"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

var (
	// floodAll runs all floods, not those alone that differ most: make floods.
	floodAll = flag.Bool("flood.all", false, "run all floods")
	// floodLarge makes of the test a measurement, with the attackers in a process of
	// their own: make bench-floods.
	floodLarge = flag.Bool("flood.large", false, "measure all floods, large ones, from another process")
)

// floodsOften are those that run without a flag: of what is announced, read and decoded.
var floodsOften = []string{"sessions that announce and never send", "pulls that nobody reads", "large requests"}

// floodVariable names the flood that a process is to be, with the server's address.
const floodVariable = "TENSORFERRY_FLOOD"

const (
	floodMemory = 64 * mib // the server's budget
	floodStore  = 64 * mib
	floodTensor = 16 * mib // what lies in the store to be pulled
	floodIdle   = 500 * time.Millisecond
	// handshakes is a flood of a server over TLS, whose attackers do not rest.
	handshakes = "handshakes that fail"
)

// floods are by what the attackers do, each on a connection of its own.
var floods = []struct {
	name string
	few  int // attackers in the test, on so many connections
	many int // when measured
	each int // RPCs, or what else there is of them, of one attacker at a time; in all not more than the server takes
	do   func(ctx context.Context, stub pb.TensorServiceClient, addr string)
}{
	{"none, but a process that computes", 1, 1, 1, func(ctx context.Context, _ pb.TensorServiceClient, _ string) {
		for data := testkit.Bytes(mib, 1); ctx.Err() == nil; {
			sealed(data[:16], 0, data)
		}
	}},
	{"sessions that say nothing", 2, 8, 100, func(ctx context.Context, stub pb.TensorServiceClient, _ string) {
		if s, err := stub.StreamTensors(ctx); err == nil {
			_, _ = s.Recv()
		}
	}},
	{"sessions that announce and never send", 2, 8, 100, func(ctx context.Context, stub pb.TensorServiceClient, _ string) {
		s, err := stub.StreamTensors(ctx)
		if err != nil {
			return
		}
		_ = s.Send(&pb.Frame{Hello: floodHello()})
		for i := range 64 {
			o := offering("echo", make([]byte, 1024), 1024)
			o.desc.OnAllowance = i%2 == 0
			_ = s.Send(&pb.Frame{Calls: []*pb.Call{o.call}, Descs: []*pb.TensorDesc{o.desc}})
		}
		drainAll(s.Recv)
	}},
	{"pushes that say nothing", 2, 8, 32, func(ctx context.Context, stub pb.TensorServiceClient, _ string) {
		if s, err := stub.PushTensors(ctx); err == nil {
			_ = s.RecvMsg(new(pb.PushTensorsResponse))
		}
	}},
	{"pushes that announce and never send", 2, 8, 32, func(ctx context.Context, stub pb.TensorServiceClient, _ string) {
		s, err := stub.PushTensors(ctx)
		if err != nil {
			return
		}
		f := &pb.Frame{Hello: floodHello()}
		for i := range 16 {
			f.Descs = append(f.Descs, pack(fmt.Sprint("flood", i), make([]byte, 64<<10), 64<<10).desc)
		}
		_ = s.Send(f)
		_ = s.RecvMsg(new(pb.PushTensorsResponse))
	}},
	{"one-byte chunks of a push", 1, 4, 4, func(ctx context.Context, stub pb.TensorServiceClient, _ string) {
		s, err := stub.PushTensors(ctx)
		if err != nil {
			return
		}
		o := pack(fmt.Sprintf("flood %x", newID()), make([]byte, 1<<20), 1)
		if s.Send(&pb.Frame{Hello: floodHello(), Descs: []*pb.TensorDesc{o.desc}}) != nil {
			return
		}
		for i := range o.data {
			if s.Send(&pb.Frame{Chunk: o.chunk(i)}) != nil {
				break
			}
		}
		_, _ = s.CloseAndRecv()
	}},
	{"one-byte chunks of a session", 1, 4, 4, func(ctx context.Context, stub pb.TensorServiceClient, _ string) {
		s, err := stub.StreamTensors(ctx)
		if err != nil || s.Send(&pb.Frame{Hello: floodHello()}) != nil {
			return
		}
		go drainAll(s.Recv) // ends with the RPC
		for ctx.Err() == nil {
			o := offering("echo", make([]byte, 4096), 1)
			o.desc.OnAllowance = true
			if s.Send(&pb.Frame{Calls: []*pb.Call{o.call}, Descs: []*pb.TensorDesc{o.desc}}) != nil {
				return
			}
			for i := range o.data {
				if s.Send(&pb.Frame{Chunk: sealed(o.desc.TensorId, uint32(i), o.data[i:i+1])}) != nil {
					return
				}
			}
		}
	}},
	{"pulls that nobody reads", 2, 8, 30, func(ctx context.Context, stub pb.TensorServiceClient, _ string) {
		s, err := stub.PullTensors(ctx, &pb.PullTensorsRequest{Hello: greeting(newID()), Selections: []*pb.Selection{{Name: "large"}}})
		if err != nil {
			return
		}
		_, _ = s.Recv()
		pause(ctx, 2*floodIdle)
	}},
	{"results that nobody reads", 2, 8, 30, func(ctx context.Context, stub pb.TensorServiceClient, _ string) {
		s, err := stub.StreamTensors(ctx)
		if err != nil || s.Send(&pb.Frame{Hello: floodHello()}) != nil {
			return
		}
		for range 32 {
			o := offering("echo", make([]byte, 16<<10), 16<<10)
			o.desc.OnAllowance = true
			if s.Send(&pb.Frame{Calls: []*pb.Call{o.call}, Descs: []*pb.TensorDesc{o.desc}, Chunk: sealed(o.desc.TensorId, 0, o.data)}) != nil {
				return
			}
		}
		pause(ctx, 2*floodIdle)
	}},
	{"streams that are reset at once", 1, 4, 16, func(ctx context.Context, stub pb.TensorServiceClient, _ string) {
		own, cancel := context.WithCancel(ctx)
		defer cancel()
		if s, err := stub.StreamTensors(own); err == nil {
			_ = s.Send(&pb.Frame{Hello: floodHello()})
		}
	}},
	{"connections that are reset", 1, 4, 4, func(_ context.Context, _ pb.TensorServiceClient, addr string) {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			return
		}
		_, _ = c.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"))
		_, _ = c.Read(make([]byte, 9))
		_ = c.(*net.TCPConn).SetLinger(0) // a reset, not an end
		_ = c.Close()
	}},
	{handshakes, 1, 4, 8, func(_ context.Context, _ pb.TensorServiceClient, addr string) {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			return
		}
		_, _ = c.Write(clientHello())
		_, _ = c.Read(make([]byte, 4096)) // the server has done its part
		_ = c.(*net.TCPConn).SetLinger(0)
		_ = c.Close()
	}},
	{"large requests", 1, 4, 4, func(ctx context.Context, stub pb.TensorServiceClient, _ string) {
		r := &pb.PullTensorsRequest{Hello: greeting(newID())}
		for range 250_000 {
			r.Selections = append(r.Selections, &pb.Selection{})
		}
		if s, err := stub.PullTensors(ctx, r); err == nil {
			_, _ = s.Recv()
		}
	}},
}

// clientHello is the first message of a handshake. Whoever repeats it computes nothing,
// while the server agrees on a key and signs.
var clientHello = sync.OnceValue(func() []byte {
	near, far := net.Pipe()
	go func() { // ends with the pipe
		_ = tls.Client(near, &tls.Config{ServerName: "localhost", MinVersion: tls.VersionTLS13}).Handshake()
	}()
	hello := make([]byte, 16<<10)
	n, _ := far.Read(hello)
	_ = far.Close()
	return hello[:n]
})

func floodHello() *pb.Hello {
	return &pb.Hello{Version: 1, SessionId: newID(), MaxChunkBytes: mib, AllowanceBytes: mib, Checksum: pb.Checksum_CHECKSUM_CRC32C, MaxOpenTensors: 64}
}

func drainAll(recv func() (*pb.Frame, error)) {
	for {
		if _, err := recv(); err != nil {
			return
		}
	}
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	<-ctx.Done()
}

// flooding runs a flood until ctx ends, and returns how often it did its worst.
func flooding(ctx context.Context, name, addr string, large bool) int64 {
	var did atomic.Int64
	var work sync.WaitGroup
	for _, f := range floods {
		if f.name != name {
			continue
		}
		attackers := f.few
		if large {
			attackers = f.many
		}
		for range attackers {
			// A window that does not grow, so that what is not read stays with the server.
			conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithInitialWindowSize(64<<10), grpc.WithInitialConnWindowSize(64<<10))
			if err != nil {
				panic(err)
			}
			defer conn.Close()
			each := f.each
			if !large {
				each = min(each, 8)
			}
			for range each {
				work.Go(func() { // ends with ctx
					for ctx.Err() == nil {
						own, cancel := context.WithTimeout(ctx, 10*time.Second)
						f.do(own, pb.NewTensorServiceClient(conn), addr)
						cancel()
						did.Add(1)
						if large && name != handshakes { // what is refused at once is not to be a flood of another kind
							pause(ctx, 100*time.Millisecond)
						}
					}
				})
			}
		}
	}
	work.Wait()
	return did.Load()
}

// TestFloodProcess is the process of the attackers; it ends with its standard input.
func TestFloodProcess(t *testing.T) {
	testkit.Start(t)
	addr := os.Getenv(floodVariable)
	if addr == "" {
		t.Skip("part of TestAHealthyClientIsServedThroughAFlood")
	}
	name := os.Getenv(floodVariable + "_NAME")
	ctx, cancel := context.WithCancel(t.Context())
	go func() { // ends with the test that started the process
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	t.Logf("did its worst %d times", flooding(ctx, name, addr, true))
}

// flood begins a flood; stop ends it.
func (f *fixture) flood(t testing.TB, name string) (stop func()) {
	t.Helper()
	if !*floodLarge {
		ctx, cancel := context.WithCancel(t.Context())
		over := make(chan struct{})
		go func() { flooding(ctx, name, f.addr, false); close(over) }() // ends with ctx
		return func() { cancel(); <-over }
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestFloodProcess$", "-test.v", "-test.timeout=10m")
	cmd.Env = append(os.Environ(), floodVariable+"="+f.addr, floodVariable+"_NAME="+name, "GOMAXPROCS=1")
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	return func() {
		require.NoError(t, in.Close())
		_ = cmd.Wait() // what became of the attackers is no matter
	}
}

// latencies makes small calls for a while, checks every answer, and returns how long
// each took, ascending.
func latencies(t testing.TB, s *client.Session, calls int, most time.Duration) []time.Duration {
	t.Helper()
	data := testkit.Bytes(1024, 1)
	x, err := tensor.Of(data)
	require.NoError(t, err)
	var took []time.Duration
	for began := time.Now(); len(took) < calls && time.Since(began) < most; {
		at := time.Now()
		y, err := s.Compute(t.Context(), "echo", x)
		require.NoError(t, err, "a healthy client's call")
		took = append(took, time.Since(at))
		require.True(t, bytes.Equal(data, y.Data))
	}
	slices.Sort(took)
	return took
}

func quantile(sorted []time.Duration, q float64) time.Duration {
	return sorted[int(math.Ceil(q*float64(len(sorted))))-1]
}

// TestAHealthyClientIsServedThroughAFlood floods a server while a client makes small
// calls: none fails, memory stays within the budget, and nothing is left. How long
// they take is printed, and asserted nowhere.
func TestAHealthyClientIsServedThroughAFlood(t *testing.T) {
	testkit.Start(t)
	calls, rounds, most := 30, 1, 2*time.Second
	if *floodLarge {
		calls, rounds, most = 20_000, 3, 4*time.Second
	}
	neighbour := 1.0
	for i, attackers := range floods {
		if !*floodAll && !*floodLarge && !slices.Contains(floodsOften, attackers.name) {
			continue
		}
		t.Run(attackers.name, func(t *testing.T) {
			testkit.Start(t)
			m := shelf(t, floodStore)
			storetest.Put(t, m, "large", make([]byte, floodTensor))
			dir, id := newIdentity(t)
			var cfg client.Config
			if attackers.name == handshakes {
				cfg = secured{dir: dir}.config(t, true)
			}
			f := serveWithin(t, floodMemory, func(c *server.Config) {
				if attackers.name == handshakes {
					c.Credentials, c.Identify = id.Credentials(), id.Principal
				}
				c.Store = m
				c.Session.FirstFrame, c.Session.ChunkIdle = stream.Instant(floodIdle), stream.Instant(floodIdle)
			})
			s := f.session(t, cfg)
			latencies(t, s, 200, time.Second) // warm
			goroutines := runtime.NumGoroutine()
			var medians, ratios []float64
			for range rounds {
				before := latencies(t, s, calls, most)
				stop := f.flood(t, attackers.name)
				latencies(t, s, calls/10, most/4) // until the flood is there
				failed, began := f.counters(t)["handshakes_failed_total"], time.Now()
				during := latencies(t, s, calls, most)
				if failed = f.counters(t)["handshakes_failed_total"] - failed; failed > 0 {
					t.Logf("%.0f handshakes a second", float64(failed)/time.Since(began).Seconds())
				}
				stop()
				ratio := float64(quantile(during, 0.99)) / float64(quantile(before, 0.99))
				ratios = append(ratios, ratio)
				medians = append(medians, float64(quantile(during, 0.5))/float64(quantile(before, 0.5)))
				t.Logf("p50 %8v p99 %8v of %5d calls; in the flood p50 %8v p99 %8v of %5d: %.2f times",
					quantile(before, 0.5), quantile(before, 0.99), len(before), quantile(during, 0.5), quantile(during, 0.99), len(during), ratio)
			}
			slices.Sort(ratios)
			slices.Sort(medians)
			info, err := f.server.GetServiceInfo(t.Context(), nil)
			require.NoError(t, err)
			c := info.GetCounters()
			require.LessOrEqual(t, c["memory_peak_bytes"], c["memory_limit_bytes"])
			used, limit := m.Used()
			require.LessOrEqual(t, used, limit)
			testkit.Eventually(t, func() bool {
				info, err := f.server.GetServiceInfo(t.Context(), nil)
				return err == nil && info.GetCounters()["sessions"] == 1 && info.GetCounters()["open_transfers"] == 0 && f.isIdle()
			}, "the end of the flood's sessions and transfers")
			testkit.Eventually(t, func() bool { return runtime.NumGoroutine() <= goroutines+8 }, "the end of the flood's goroutines")
			testkit.Eventually(t, func() bool { r, err := m.Open(t.Context(), "large"); return err != nil || release(r) }, "the store")
			latencies(t, s, 10, time.Second) // and still
			require.Zero(t, c["panics_total"])
			ratio := ratios[len(ratios)/2]
			if i == 0 {
				neighbour = ratio
			}
			if *floodLarge {
				fmt.Printf("%-38s p50 %6.2f and p99 %6.2f times the baseline, %6.2f times that beside a process that computes; RSS %4d MiB, peak of the budget %3d MiB\n",
					attackers.name, medians[len(medians)/2], ratio, ratio/neighbour, residentMiB(), c["memory_peak_bytes"]/mib)
			}
		})
	}
}

func release(r interface{ Release() }) bool { r.Release(); return true }

// residentMiB is the test's own memory, server included; 0 where nobody tells.
func residentMiB() int {
	var size, resident int
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	_, _ = fmt.Sscan(string(b), &size, &resident)
	return resident * os.Getpagesize() / mib
}
