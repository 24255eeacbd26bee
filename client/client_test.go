package client_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/store/memory"
	"github.com/tensorferry/tensorferry/tensor"
)

const mib = 1 << 20

// fixture is a server with the built-in models and "pair", and a client of it.
type fixture struct {
	server *server.Server
	host   *cpu.Host
	client *client.Client
	addr   string
	ended  bool
	end    func() // ends all, and sees that no memory is held; at the end of the test at the latest
}

// serverConfig is what a test may change of a fixture's server.
type serverConfig = server.Config

func start(t testing.TB, network string, cfg client.Config) *fixture {
	t.Helper()
	return startServer(t, network, cfg, func(*serverConfig) {})
}

func startServer(t testing.TB, network string, cfg client.Config, change func(*serverConfig)) *fixture {
	t.Helper()
	if network != "unix" {
		l := listen(t)
		return serveAt(t, l, l.Addr().String(), cfg, change)
	}
	l, err := net.Listen(network, filepath.Join(t.TempDir(), "socket"))
	require.NoError(t, err)
	return serveAt(t, l, "unix:"+l.Addr().String(), cfg, change)
}

// serveAt is like startServer, with a listener and its address.
func serveAt(t testing.TB, l net.Listener, address string, cfg client.Config, change func(*serverConfig)) *fixture {
	t.Helper()
	f := &fixture{host: cpu.NewHost(cpu.HostConfig{MemoryBytes: 512 * mib, Workers: 2})}
	models := engine.NewRegistry()
	for _, m := range append(cpu.Builtins(f.host), cpu.Slow(f.host), f.pair(t)) {
		require.NoError(t, models.Add(m))
	}
	var err error
	config := server.Config{Models: models, Pool: f.host.Pool(), Budget: f.host.Budget(), Store: memory.New(f.host.Pool(), 32*mib)}
	change(&config)
	f.server, err = server.New(config)
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- f.server.Serve(l) }() // ends with Close
	f.addr = address
	f.client, err = dial(f.addr, cfg)
	require.NoError(t, err)
	f.end = func() {
		if f.ended {
			return
		}
		f.ended = true
		require.NoError(t, f.client.Close())
		f.server.Close()
		require.NoError(t, <-served)
		require.NoError(t, config.Store.Close())
		used, _, _ := f.host.Budget().Used()
		require.Zero(t, used)
		testkit.Eventually(t, func() bool { n, _ := f.host.Pool().Live(); return n == 0 }, "every slab released")
		f.host.Close()
	}
	t.Cleanup(f.end)
	return f
}

func (f *fixture) session(t testing.TB) *client.Session {
	t.Helper()
	s, err := f.client.Session(t.Context())
	require.NoError(t, err)
	return s
}

// pair gives back x and w by the names of each other.
func (f *fixture) pair(t testing.TB) engine.Model {
	ports := []engine.Port{{Name: "x", Shape: []int64{engine.Free}}, {Name: "w", Shape: []int64{engine.Free}}}
	m, err := cpu.Func{
		Info: engine.Info{Name: "pair", Inputs: ports, Outputs: ports},
		Call: func(_ context.Context, in []tensor.Tensor, _ map[string]string) ([]tensor.Tensor, error) {
			return []tensor.Tensor{in[1], in[0]}, nil
		},
	}.Model(f.host)
	require.NoError(t, err)
	return m
}

// input is n random bytes as a uint8 vector.
func input(t testing.TB, n int) tensor.Tensor {
	t.Helper()
	x, err := tensor.Of(testkit.Bytes(n, uint64(n)))
	require.NoError(t, err)
	return x
}

// sizes are the boundaries of chunks, HTTP/2 frames, small views and slots.
var sizes = []int{0, 1, 1024, 1025, 16383, 16384, 16385, 256 << 10, mib - 1, mib, mib + 1, 2*mib + 1, 20*mib + 7}

// into returns a sink that collects what is written.
func into(b *bytes.Buffer) client.Sink {
	return client.Writer(func(tensor.Desc) (io.Writer, error) { return b, nil })
}

func TestAWriterGetsEveryByteInOrder(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	s := f.session(t)
	for _, chunk := range []int{0, 1000} {
		f := f
		if chunk > 0 {
			c, err := client.Dial(f.addr, client.Config{ChunkBytes: chunk})
			require.NoError(t, err)
			defer func() { require.NoError(t, c.Close()) }()
			s, err = c.Session(t.Context())
			require.NoError(t, err)
		}
		for _, n := range sizes {
			if chunk > 0 && n > 2*mib {
				continue
			}
			x := input(t, n)
			var got bytes.Buffer
			var desc tensor.Desc
			call, err := s.Call(t.Context(), client.Request{
				Model: "echo", Inputs: []client.Input{client.From("", x)},
				Results: map[string]client.Sink{"y": client.Writer(func(d tensor.Desc) (io.Writer, error) { desc = d; return &got, nil })},
			})
			require.NoError(t, err)
			results, err := call.Wait()
			require.NoError(t, err)
			require.Equal(t, x.Desc, desc)
			require.Equal(t, x.Desc, results["y"].Desc)
			require.Nil(t, results["y"].Data)
			require.True(t, bytes.Equal(x.Data, got.Bytes()), "%d bytes in chunks of %d", n, chunk)
		}
	}
}

func TestAWriterThatFailsCancelsTheCallAndSaysWhere(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	s := f.session(t)
	broken := errors.New("disk full")
	for name, sink := range map[string]client.Sink{
		"when opened": client.Writer(func(tensor.Desc) (io.Writer, error) { return nil, broken }),
		"mid-way": client.Writer(func(tensor.Desc) (io.Writer, error) {
			n := 0
			return writer(func(p []byte) (int, error) {
				if n += len(p); n > 3*mib {
					return 0, broken
				}
				return len(p), nil
			}), nil
		}),
		"at the end": client.Writer(func(tensor.Desc) (io.Writer, error) {
			n := 0
			return writer(func(p []byte) (int, error) {
				if n += len(p); n == 20*mib {
					return 0, broken
				}
				return len(p), nil
			}), nil
		}),
	} {
		t.Run(name, func(t *testing.T) {
			call, err := s.Call(t.Context(), client.Request{
				Model: "echo", Inputs: []client.Input{client.From("", input(t, 20*mib))}, Results: map[string]client.Sink{"y": sink},
			})
			require.NoError(t, err)
			_, err = call.Wait()
			require.ErrorIs(t, err, broken)
			require.ErrorContains(t, err, `result "y"`)
			require.Equal(t, codes.FailedPrecondition, status.Code(err))
			_, err = s.Compute(t.Context(), "echo", input(t, 10))
			require.NoError(t, err, "the session lives on")
		})
	}
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

func TestASlowWriterHoldsTheServerUpNotTheMemory(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	s := f.session(t)
	r, w := io.Pipe()
	const size = 64 * mib
	call, err := s.Call(t.Context(), client.Request{
		Model: "echo", Inputs: []client.Input{client.From("", input(t, size))},
		Results: map[string]client.Sink{"y": client.Writer(func(tensor.Desc) (io.Writer, error) { return w, nil })},
	})
	require.NoError(t, err)
	n, err := io.CopyN(io.Discard, r, 1)
	require.NoError(t, err)
	require.Equal(t, int64(1), n)
	sent := func() int64 {
		info, err := f.client.Info(t.Context())
		require.NoError(t, err)
		return info.Counters["sent_bytes_total"]
	}
	testkit.Eventually(t, func() bool { return sent() >= 8*mib }, "the first slots")
	require.LessOrEqual(t, sent(), int64(10*mib), "no more than the slots was sent")
	rest, err := io.CopyN(io.Discard, r, size-1)
	require.NoError(t, err)
	require.Equal(t, int64(size-1), rest)
	_, err = call.Wait()
	require.NoError(t, err)
}

func TestIntoTakesAResultOfExactlyItsSize(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{ResultBytes: 3 * mib})
	s := f.session(t)
	for _, n := range sizes {
		x := input(t, n)
		dst := make([]byte, n)
		call, err := s.Call(t.Context(), client.Request{
			Model: "echo", Inputs: []client.Input{client.From("", x)}, Results: map[string]client.Sink{"y": client.Into(dst)},
		})
		require.NoError(t, err)
		results, err := call.Wait()
		require.NoError(t, err)
		require.True(t, bytes.Equal(x.Data, dst), "%d bytes", n)
		require.Len(t, results["y"].Data, n)
	}
	for _, wrong := range []int{9, 11} {
		call, err := s.Call(t.Context(), client.Request{
			Model: "echo", Inputs: []client.Input{client.From("", input(t, 10))},
			Results: map[string]client.Sink{"y": client.Into(make([]byte, wrong))},
		})
		require.NoError(t, err)
		_, err = call.Wait()
		require.ErrorContains(t, err, fmt.Sprintf(`result "y": uint8[10] has 10 bytes, but Into was given %d`, wrong))
	}
	_, err := s.Compute(t.Context(), "echo", input(t, 3*mib+1))
	require.ErrorContains(t, err, "ResultBytes allows 3145728")
	_, err = s.Compute(t.Context(), "echo", input(t, 10))
	require.NoError(t, err, "the session lives on")
}

func TestAReaderFeedsATensorOfAnySize(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	s := f.session(t)
	for _, n := range append(sizes, 40*mib) {
		x := input(t, n)
		var got bytes.Buffer
		call, err := s.Call(t.Context(), client.Request{
			Model:   "echo",
			Inputs:  []client.Input{client.FromReader("", x.Desc, iotest.HalfReader(bytes.NewReader(x.Data)))},
			Results: map[string]client.Sink{"y": into(&got)},
		})
		require.NoError(t, err)
		_, err = call.Wait()
		require.NoError(t, err)
		require.True(t, bytes.Equal(x.Data, got.Bytes()), "%d bytes", n)
	}
}

func TestAReaderThatEndsEarlyCancelsItsCallAndSaysSo(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	s := f.session(t)
	x := input(t, 20*mib)
	broken := errors.New("bad sector")
	for name, tc := range map[string]struct {
		reader io.Reader
		cause  error
		says   string
	}{
		"empty":  {bytes.NewReader(nil), io.EOF, "ended after 0 of 20971520 bytes"},
		"short":  {bytes.NewReader(x.Data[:12*mib+5]), io.ErrUnexpectedEOF, "ended after 12582917 of 20971520 bytes"},
		"broken": {io.MultiReader(bytes.NewReader(x.Data[:mib]), iotest.ErrReader(broken)), broken, "after 1048576 of"},
	} {
		t.Run(name, func(t *testing.T) {
			call, err := s.Call(t.Context(), client.Request{Model: "echo", Inputs: []client.Input{client.FromReader("", x.Desc, tc.reader)}})
			require.NoError(t, err)
			_, err = call.Wait()
			require.ErrorIs(t, err, client.ErrInput)
			require.ErrorIs(t, err, tc.cause)
			require.ErrorContains(t, err, tc.says)
			testkit.Eventually(t, func() bool {
				info, err := f.client.Info(t.Context())
				return err == nil && info.Counters["calls"] == 0
			}, "the server to hear of it")
		})
	}
}

func TestAnInputThatIsNotItsDescIsRefusedAtOnce(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	s := f.session(t)
	for name, in := range map[string]client.Input{
		"too short":    {Desc: tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{3}}, Data: make([]byte, 11)},
		"no data type": {Desc: tensor.Desc{Shape: tensor.Shape{3}}, Data: make([]byte, 3)},
		"overflow":     {Desc: tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{1 << 40, 1 << 40}}},
		"many chunks":  {Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{1 << 40, 2}}, Reader: bytes.NewReader(nil)},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := s.Call(t.Context(), client.Request{Model: "echo", Inputs: []client.Input{in}})
			require.ErrorIs(t, err, client.ErrInput)
		})
	}
	_, err := s.Compute(t.Context(), "echo", input(t, 10))
	require.NoError(t, err)
}

func TestRegionsYieldEveryByteOnceWhileTheyArrive(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	const chunks = 256
	data := make([]byte, chunks*64<<10)
	copy(data, testkit.Bytes(len(data), 7))
	c, err := client.Dial(f.addr, client.Config{ChunkBytes: 64 << 10})
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close()) }()
	s, err := c.Session(t.Context())
	require.NoError(t, err)
	x, err := tensor.New(tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{int64(len(data) / 4)}}, data)
	require.NoError(t, err)
	want, err := s.Compute(t.Context(), "relu", x)
	require.NoError(t, err)

	r, w := io.Pipe()
	call, err := s.Call(t.Context(), client.Request{Model: "relu", Inputs: []client.Input{client.FromReader("", x.Desc, r)}})
	require.NoError(t, err)
	last := len(data) - 64<<10
	go func() { _, _ = w.Write(data[:last]) }() // ends when the call has read it
	seen := map[int64]bool{}
	for region, err := range call.Regions() {
		require.NoError(t, err)
		require.Equal(t, "y", region.Port)
		require.Equal(t, x.Desc, region.Desc)
		require.False(t, seen[region.Off], "offset %d twice", region.Off)
		seen[region.Off] = true
		require.Equal(t, string(want.Data[region.Off:region.Off+int64(len(region.Data))]), string(region.Data))
		if len(seen) == chunks-1 { // every block but the one whose input is withheld
			go func() {
				_, _ = w.Write(data[last:])
				_ = w.Close()
			}()
		}
	}
	require.Len(t, seen, chunks)
	results, err := call.Wait()
	require.NoError(t, err)
	require.Equal(t, string(want.Data), string(results["y"].Data))
}

func TestRegionsEndWithTheCallsError(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	s := f.session(t)
	call, err := s.Call(t.Context(), client.Request{
		Model: "slow", Inputs: []client.Input{client.From("", input(t, 8*mib))}, Params: map[string]string{"fail_at": fmt.Sprint(7 * mib)},
	})
	require.NoError(t, err)
	var last error
	for _, err := range call.Regions() {
		require.NoError(t, last, "an error is the last pair")
		last = err
	}
	require.Equal(t, codes.Internal, status.Code(last))
	_, err = call.Wait()
	require.Equal(t, last, err)
}

func TestInputsAndResultsGoByTheirPorts(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	s := f.session(t)
	for _, n := range []int{0, 1, 100, 8 * mib} {
		x, w := input(t, n), input(t, 400)
		var back bytes.Buffer
		call, err := s.Call(t.Context(), client.Request{
			Model:   "pair",
			Inputs:  []client.Input{client.From("w", w), client.FromReader("x", x.Desc, bytes.NewReader(x.Data))},
			Results: map[string]client.Sink{"w": into(&back)},
		})
		require.NoError(t, err)
		results, err := call.Wait()
		require.NoError(t, err)
		require.Len(t, results, 2)
		require.True(t, bytes.Equal(w.Data, results["x"].Data))
		require.True(t, bytes.Equal(x.Data, back.Bytes()))
	}
	_, err := s.Compute(t.Context(), "pair", input(t, 4))
	require.Equal(t, codes.InvalidArgument, status.Code(err))
	require.ErrorContains(t, err, `takes inputs ["x"`)
}

func TestMoreCallsThanASessionMayHaveOpenWaitTheirTurn(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	s := f.session(t)
	var all sync.WaitGroup
	const calls = 300
	errs := make(chan error, calls)
	for i := range calls {
		x := input(t, 1+i*331)
		all.Go(func() {
			y, err := s.Compute(t.Context(), "echo", x)
			if err == nil && !bytes.Equal(x.Data, y.Data) {
				err = errors.New("wrong result")
			}
			errs <- err
		})
	}
	all.Wait()
	for range calls {
		require.NoError(t, <-errs)
	}
}

func TestCallsInFlightShareASession(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	s := f.session(t)
	x := input(t, mib+5)
	calls := make([]*client.Call, 100)
	for i := range calls {
		var err error
		calls[i], err = s.Call(t.Context(), client.Request{Model: "echo", Inputs: []client.Input{client.From("", x)}})
		require.NoError(t, err)
	}
	for _, c := range calls {
		results, err := c.Wait()
		require.NoError(t, err)
		require.True(t, bytes.Equal(x.Data, results["y"].Data))
	}
}

func TestManySessionsShareAConnection(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	x := input(t, 5000)
	for range 3 {
		var open []*client.Session
		for range 40 {
			s := f.session(t)
			y, err := s.Compute(t.Context(), "echo", x)
			require.NoError(t, err)
			require.Equal(t, x.Data, y.Data)
			open = append(open, s)
		}
		for _, s := range open {
			require.NoError(t, s.Close())
			require.NoError(t, s.Close(), "twice does no harm")
		}
	}
	testkit.Eventually(t, func() bool {
		info, err := f.client.Info(t.Context())
		return err == nil && info.Counters["sessions"] == 0
	}, "the server to hear of it")
}

func TestAUnixSocketCarriesTheSame(t *testing.T) {
	testkit.Start(t)
	f := start(t, "unix", client.Config{})
	for _, n := range sizes {
		x := input(t, n)
		y, err := f.client.Compute(t.Context(), "echo", x)
		require.NoError(t, err)
		require.True(t, bytes.Equal(x.Data, y.Data), "%d bytes", n)
	}
}

func TestComputeFromManyGoroutinesUsesOneSession(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	x := input(t, 1000)
	var all sync.WaitGroup
	errs := make(chan error, 64)
	for range 64 {
		all.Go(func() {
			y, err := f.client.Compute(t.Context(), "echo", x)
			if err == nil && !bytes.Equal(x.Data, y.Data) {
				err = errors.New("wrong result")
			}
			errs <- err
		})
	}
	all.Wait()
	for range 64 {
		require.NoError(t, <-errs)
	}
	info, err := f.client.Info(t.Context())
	require.NoError(t, err)
	require.Equal(t, int64(1), info.Counters["sessions_total"])
	models, err := f.client.Models(t.Context())
	require.NoError(t, err)
	var names []string
	for _, m := range models {
		names = append(names, m.Name)
	}
	require.Subset(t, names, []string{"echo", "pair"})
}

func TestNoServerIsAClearErrorAtOnce(t *testing.T) {
	testkit.Start(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := l.Addr().String()
	require.NoError(t, l.Close())
	for target, says := range map[string]string{
		addr: "connection refused", "unix:" + filepath.Join(t.TempDir(), "none"): "no such file",
	} {
		c, err := client.Dial(target, client.Config{OpenTimeout: time.Hour}) // not what ends it
		require.NoError(t, err)
		_, err = c.Session(t.Context())
		require.Equal(t, codes.Unavailable, status.Code(err))
		require.ErrorContains(t, err, says)
		_, err = c.Models(t.Context())
		require.Equal(t, codes.Unavailable, status.Code(err))
		require.NoError(t, c.Close())
		_, err = c.Session(t.Context())
		require.ErrorIs(t, err, client.ErrClosed)
	}
	for _, target := range []string{
		"", "\x00", "foo", "localhost", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:http", "http://x:1", "unix:", "unix://",
	} {
		_, err = client.Dial(target, client.Config{})
		require.ErrorContains(t, err, "is not an address; write host:port or unix:/path", target)
	}
	_, err = client.Dial(addr, client.Config{ChunkBytes: 4*mib + 1})
	require.ErrorContains(t, err, "4194305")
	_, err = client.Dial(addr, client.Config{Codec: 9})
	require.ErrorContains(t, err, "Codec is 9")
	_, err = client.Dial(addr, client.Config{Checksum: 9})
	require.ErrorContains(t, err, "CRC-32C")
}

func TestAServerOfAnotherKindIsRecognized(t *testing.T) {
	testkit.Start(t)
	page := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("<html>")) })
	missing := http.NotFoundHandler()
	var plain http.Protocols
	plain.SetUnencryptedHTTP2(true)
	for name, serve := range map[string]func(l net.Listener) (stop func()){
		"gRPC": func(l net.Listener) func() {
			s := grpc.NewServer()
			go func() { _ = s.Serve(l) }()
			return s.Stop
		},
		"HTTP/1":          web(&http.Server{Handler: page}, false),
		"HTTP/2":          web(&http.Server{Handler: page, Protocols: &plain}, false),
		"HTTP/2, no page": web(&http.Server{Handler: missing, Protocols: &plain}, false),
		"TLS":             web(&http.Server{Handler: page}, true),
	} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			defer serve(l)()
			c, err := client.Dial(l.Addr().String(), client.Config{})
			require.NoError(t, err)
			defer func() { require.NoError(t, c.Close()) }()
			want, is := "client: not a tensorferry server: "+l.Addr().String(), client.ErrNotServer
			if name == "TLS" { // it says no word
				want, is = "client: no connection: "+l.Addr().String()+" ends connections at once: an overloaded server does, one that is ending, or another kind of server", client.ErrNoConnection
			}
			_, err = c.Session(t.Context())
			require.ErrorIs(t, err, is)
			require.EqualError(t, err, want)
			_, err = c.Models(t.Context())
			require.ErrorIs(t, err, is)
			require.EqualError(t, err, want)
			_, err = c.Push(t.Context(), client.PushRequest{Tensors: []client.Input{{Name: "x", Desc: tensor.Desc{DType: tensor.Int8}, Data: make([]byte, 1)}}})
			require.ErrorIs(t, err, is)
			_, err = c.Pull(t.Context(), client.PullRequest{Select: []client.Selection{{Name: "x"}}})
			require.ErrorIs(t, err, is)
		})
	}
}

// TestTheTextsOfGRPCAreThoseOfTheVersionInUse provokes each text that is matched, without a Client,
// which has types for what it sees itself.
func TestTheTextsOfGRPCAreThoseOfTheVersionInUse(t *testing.T) {
	testkit.Start(t)
	page := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == pb.TensorService_ListModels_FullMethodName {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "text/html")
		_, _ = w.Write([]byte("<html>"))
	})
	var plain http.Protocols
	plain.SetUnencryptedHTTP2(true)
	info, models := pb.TensorService_GetServiceInfo_FullMethodName, pb.TensorService_ListModels_FullMethodName
	for text, tc := range map[string]struct {
		serve  func(net.Listener) func()
		method string
		creds  credentials.TransportCredentials
	}{
		"notConnected": {func(l net.Listener) func() { _ = l.Close(); return func() {} }, info, nil},
		"noPreface":    {web(&http.Server{Handler: page}, false), info, nil},
		"otherHTTP":    {web(&http.Server{Handler: page, Protocols: &plain}, false), models, nil},
		"otherType":    {web(&http.Server{Handler: page, Protocols: &plain}, false), info, nil},
		"noProtocol": {func(l net.Listener) func() {
			l = tls.NewListener(l, &tls.Config{Certificates: httptestCertificates(t), MinVersion: tls.VersionTLS13})
			return web(&http.Server{Handler: page}, false)(l)
		}, info, credentials.NewTLS(&tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13})},
	} {
		t.Run(text, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			defer tc.serve(l)()
			if tc.creds == nil {
				tc.creds = insecure.NewCredentials()
			}
			conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(tc.creds))
			require.NoError(t, err)
			defer conn.Close()
			err = conn.Invoke(t.Context(), tc.method, &pb.GetServiceInfoRequest{}, &pb.GetServiceInfoResponse{})
			require.ErrorContains(t, err, client.GRPCTexts[text])
		})
	}
}

// httptestCertificates returns the certificate of net/http/httptest.
func httptestCertificates(t *testing.T) []tls.Certificate {
	s := httptest.NewUnstartedServer(nil)
	s.StartTLS()
	defer s.Close()
	return s.TLS.Certificates
}

// web serves HTTP on a listener, with TLS if secure.
func web(s *http.Server, secure bool) func(l net.Listener) (stop func()) {
	return func(l net.Listener) func() {
		s := httptest.Server{Listener: l, Config: s}
		s.Config.ErrorLog = log.New(io.Discard, "", 0)
		if secure {
			s.StartTLS()
		} else {
			s.Start()
		}
		return s.Close
	}
}

func TestAServerThatIsNotThereIsRecognized(t *testing.T) {
	testkit.Start(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	for address, want := range map[string]error{l.Addr().String(): client.ErrNoConnection, "unix:/nothing/here": client.ErrNoConnection, "host.invalid:1": client.ErrHostNotFound} {
		c, err := client.Dial(address, client.Config{})
		require.NoError(t, err)
		_, err = c.Models(t.Context())
		require.ErrorIs(t, err, want)
		require.Equal(t, codes.Unavailable, status.Code(err))
		_, err = c.Session(t.Context())
		require.ErrorIs(t, err, want)
		require.NoError(t, c.Close())
	}
}

func TestAServerThatNeverAnswersEndsWithOpenTimeoutOrTheContext(t *testing.T) {
	testkit.Start(t)
	l, err := net.Listen("tcp", "127.0.0.1:0") // accepts, and says nothing
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	c, err := client.Dial(l.Addr().String(), client.Config{OpenTimeout: 50 * time.Millisecond})
	require.NoError(t, err)
	_, err = c.Session(t.Context())
	require.Equal(t, codes.DeadlineExceeded, status.Code(err), err)
	require.ErrorIs(t, err, client.ErrNoAnswer)
	require.ErrorContains(t, err, "within 50ms")
	_, err = c.Info(t.Context())
	require.Equal(t, codes.DeadlineExceeded, status.Code(err), err)
	require.ErrorIs(t, err, client.ErrNoAnswer)
	require.ErrorContains(t, err, "no answer")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = c.Session(ctx)
	require.Equal(t, codes.Canceled, status.Code(err), err)
	require.NoError(t, c.Close())

	c, err = client.Dial(l.Addr().String(), client.Config{})
	require.NoError(t, err)
	opening := make(chan error)
	go func() { _, err := c.Session(context.Background()); opening <- err }()
	require.NoError(t, c.Close(), "also while a session is being opened")
	require.Error(t, <-opening)
}

func TestEndsOfACallAtEveryPhase(t *testing.T) {
	testkit.Start(t)
	for name, tc := range map[string]struct {
		strike func(f *fixture, s *client.Session, cancel context.CancelFunc, c *client.Call)
		code   codes.Code
		is     error
	}{
		"context": {func(_ *fixture, _ *client.Session, cancel context.CancelFunc, _ *client.Call) { cancel() }, codes.Canceled, context.Canceled},
		"cancel":  {func(_ *fixture, _ *client.Session, _ context.CancelFunc, c *client.Call) { c.Cancel() }, codes.Canceled, context.Canceled},
		"session": {func(_ *fixture, s *client.Session, _ context.CancelFunc, _ *client.Call) { _ = s.Close() }, codes.Canceled, nil},
		"client":  {func(f *fixture, _ *client.Session, _ context.CancelFunc, _ *client.Call) { _ = f.client.Close() }, codes.Canceled, nil},
		"server":  {func(f *fixture, _ *client.Session, _ context.CancelFunc, _ *client.Call) { f.server.Close() }, codes.Unavailable, nil},
	} {
		for _, phase := range []string{"before the first byte", "amid the input", "computing", "results not taken"} {
			t.Run(name+"/"+phase, func(t *testing.T) {
				testkit.Start(t)
				f := start(t, "tcp", client.Config{})
				s := f.session(t)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				const size = 24 * mib
				r, w := io.Pipe() // the input
				out, in := io.Pipe()
				request := client.Request{
					Model: "slow", Inputs: []client.Input{client.FromReader("", tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{size}}, r)},
					Params:  map[string]string{"delay": "1m"},
					Results: map[string]client.Sink{"y": client.Writer(func(tensor.Desc) (io.Writer, error) { return in, nil })},
				}
				if phase == "results not taken" {
					request.Params["delay"] = "0s"
				}
				call, err := s.Call(ctx, request)
				require.NoError(t, err)
				received := func(n int64) {
					testkit.Eventually(t, func() bool {
						info, err := f.server.GetServiceInfo(t.Context(), nil)
						return err == nil && info.Counters["received_bytes_total"] >= n
					}, "the input")
				}
				fed := make(chan struct{})
				go func() { // ends with the input, or with the pipe
					defer close(fed)
					switch phase {
					case "amid the input":
						_, _ = w.Write(make([]byte, 3*mib+5))
					case "computing", "results not taken":
						_, _ = w.Write(make([]byte, size))
					}
				}()
				switch phase {
				case "amid the input":
					received(3 * mib)
				case "computing":
					received(8 * mib) // the rest waits for blocks
				case "results not taken":
					_, err := io.ReadFull(out, make([]byte, 1))
					require.NoError(t, err)
				}
				tc.strike(f, s, cancel, call)
				for _, err := range call.Regions() { // nothing but the error, at the call's end
					require.Error(t, err)
				}
				// A caller whose reader or writer is stuck has to end it itself.
				require.NoError(t, r.CloseWithError(io.ErrClosedPipe))
				require.NoError(t, w.CloseWithError(io.ErrClosedPipe))
				require.NoError(t, out.CloseWithError(io.ErrClosedPipe))
				<-fed
				_, err = call.Wait()
				require.Equal(t, tc.code, status.Code(err), err)
				if tc.is != nil {
					require.ErrorIs(t, err, tc.is)
				}
			})
		}
	}
}

func TestACallThatHasEndedWellStaysWell(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	s := f.session(t)
	ctx, cancel := context.WithCancel(t.Context())
	x := input(t, 1000)
	call, err := s.Call(ctx, client.Request{Model: "echo", Inputs: []client.Input{client.From("", x)}})
	require.NoError(t, err)
	for _, err := range call.Regions() {
		require.NoError(t, err)
	}
	cancel()
	call.Cancel()
	require.NoError(t, s.Close())
	results, err := call.Wait()
	require.NoError(t, err)
	require.Equal(t, x.Data, results["y"].Data)
	_, err = s.Compute(t.Context(), "echo", x)
	require.ErrorIs(t, err, client.ErrClosed)
	ctx, cancel = context.WithDeadline(t.Context(), time.Unix(0, 0))
	defer cancel()
	_, err = f.session(t).Compute(ctx, "echo", x)
	require.Equal(t, codes.DeadlineExceeded, status.Code(err))
}

func TestATimeoutIsTheServersToKeep(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	s := f.session(t)
	call, err := s.Call(t.Context(), client.Request{
		Model: "slow", Inputs: []client.Input{client.From("", input(t, 10))},
		Params: map[string]string{"delay": "1m"}, Timeout: 50 * time.Millisecond,
	})
	require.NoError(t, err)
	_, err = call.Wait()
	require.Equal(t, codes.DeadlineExceeded, status.Code(err))
	require.ErrorContains(t, err, "timeout")
}

func TestADrainingServerIsToldFromAFailingOne(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	s := f.session(t)
	r, w := io.Pipe()
	x := input(t, 2*mib)
	call, err := s.Call(t.Context(), client.Request{Model: "echo", Inputs: []client.Input{client.FromReader("", x.Desc, r)}})
	require.NoError(t, err)
	_, err = w.Write(x.Data[:mib])
	require.NoError(t, err)
	testkit.Eventually(t, func() bool {
		info, err := f.client.Info(t.Context())
		return err == nil && info.Counters["received_bytes_total"] == mib
	}, "the call")
	down := make(chan error, 1)
	go func() { down <- f.server.Shutdown(context.Background()) }()
	testkit.Eventually(t, func() bool {
		_, err := s.Compute(t.Context(), "echo", x)
		return errors.Is(err, client.ErrDraining)
	}, "the drain")
	_, err = f.client.Session(t.Context())
	require.Equal(t, codes.Unavailable, status.Code(err))
	var own *client.Error
	require.ErrorAs(t, err, &own)
	require.Positive(t, own.RetryAfter)
	_, err = w.Write(x.Data[mib:])
	require.NoError(t, err)
	results, err := call.Wait()
	require.NoError(t, err)
	require.Equal(t, string(x.Data), string(results["y"].Data))
	require.NoError(t, <-down)
}

func TestACallThatCanNotBeSaidFailsAloneAndTheSessionLivesOn(t *testing.T) {
	testkit.Start(t)
	s := start(t, "tcp", client.Config{}).session(t)
	x, err := tensor.Of([]float32{1, -2})
	require.NoError(t, err)
	many := make([]client.Input, 65)
	for i := range many {
		many[i] = client.From(strconv.Itoa(i), x)
	}
	for name, r := range map[string]client.Request{
		"params that are not UTF-8": {Model: "echo", Inputs: []client.Input{client.From("x", x)}, Params: map[string]string{"k": "\xff"}},
		"a model that is not UTF-8": {Model: "\xff", Inputs: []client.Input{client.From("x", x)}},
		"a port that is not UTF-8":  {Model: "echo", Inputs: []client.Input{client.From("\xff", x)}},
		"a name that is not UTF-8":  {Model: "echo", Inputs: []client.Input{{Port: "x", Desc: x.Desc, Data: x.Data, Name: "\xff"}}},
		"65 inputs":                 {Model: "echo", Inputs: many},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := s.Call(t.Context(), r)
			require.ErrorIs(t, err, client.ErrInput)
			y, err := s.Compute(t.Context(), "relu", x)
			require.NoError(t, err)
			require.Equal(t, x.Desc, y.Desc)
		})
	}
}

func TestASessionKeepsNothingOfCallsThatEnded(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	s := f.session(t)
	var alive atomic.Int64
	for range 40 {
		dst := new([mib]byte)
		alive.Add(1)
		runtime.AddCleanup(dst, func(int) { alive.Add(-1) }, 0)
		c, err := s.Call(t.Context(), client.Request{
			Model:   "slow",
			Params:  map[string]string{"delay": "1ms"},
			Inputs:  []client.Input{client.From("", tensor.Tensor{Desc: tensor.Desc{DType: tensor.Int8, Shape: tensor.Shape{mib}}, Data: make([]byte, mib)})},
			Results: map[string]client.Sink{"y": client.Into(dst[:])},
		})
		require.NoError(t, err)
		for _, err := range c.Regions() {
			require.NoError(t, err)
			break // some of it has come
		}
		c.Cancel()
		_, _ = c.Wait() // cancelled, or faster
	}
	testkit.Eventually(t, func() bool { runtime.GC(); return alive.Load() <= 1 }, "the results to be let go of")
	require.NoError(t, s.Close())
}

func TestAClientKeepsABoundedAmountOfMemoryForTheNextResults(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	s := f.session(t)
	require.Zero(t, f.client.Kept())
	for range 3 {
		x := input(t, 40*mib)
		var got bytes.Buffer
		call, err := s.Call(t.Context(), client.Request{
			Model: "echo", Inputs: []client.Input{client.From("", x)}, Results: map[string]client.Sink{"y": into(&got)},
		})
		require.NoError(t, err)
		_, err = call.Wait()
		require.NoError(t, err)
		require.Positive(t, f.client.Kept())
		require.LessOrEqual(t, f.client.Kept(), int64(64*mib))
	}
}
