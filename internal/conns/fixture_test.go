package conns

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/tap"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/inbound"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/internal/wire"
)

const mib = 1 << 20

// bubble runs a test where time passes as soon as everybody waits, over a network in memory.
var bubble = testkit.Bubble

// handshake is how long the connections of a fixture have to say what they are.
const handshake = 2 * time.Second

// fixture is a Set between gRPC and a network.
type fixture struct {
	*Set
	memory *inbound.Memory
	addr   string

	frames func(*Frames) error                                 // serves /test.Service/Frames
	unary  func(context.Context, *wrapperspb.BytesValue) error // runs before /test.Service/Echo answers
	reject func(ctx context.Context, method string) error      // has RPCs rejected before they begin
	creds  credentials.TransportCredentials
	tls    *tls.Config // of clients; nil: they do not encrypt

	mu   sync.Mutex
	text strings.Builder // what was logged; guarded by mu
}

// serve returns connections of a server that the test's end closes, and that nothing is
// left of then.
func serve(t *testing.T, change func(*Config, *fixture)) *fixture {
	t.Helper()
	const message = mib
	f := &fixture{memory: inbound.NewMemory(32*mib, message), creds: insecure.NewCredentials()}
	cfg := Config{
		Log:         slog.New(slog.NewTextHandler(f, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Connections: 100, ThinFrames: 1 << 30, Memory: f.memory, Lanes: 4, Full: func(net.Conn) {},
	}
	if change != nil {
		change(&cfg, f)
	}
	f.Set = New(cfg)
	server := grpc.NewServer(
		grpc.ForceServerCodecV2(wire.Codec{}), grpc.StatsHandler(statistics{f.Set}), grpc.ReadBufferSize(0),
		grpc.ConnectionTimeout(handshake), grpc.Creds(f.Credentials(f.creds, message, true)), grpc.InTapHandle(f.tap),
	)
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "test.Service", HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Echo", Handler: func(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			in := new(wrapperspb.BytesValue)
			if err := decode(in); err != nil {
				return nil, err
			}
			received(ctx).Next()
			if f.unary != nil {
				if err := f.unary(ctx, in); err != nil {
					return nil, err
				}
			}
			if a := From(ctx).Answer(in); a != nil {
				return a, nil
			}
			return nil, inbound.ErrMemory
		}}},
		Streams: []grpc.StreamDesc{{StreamName: "Frames", ClientStreams: true, ServerStreams: true, Handler: func(_ any, s grpc.ServerStream) error {
			return f.frames(From(s.Context()).Frames(accounted{s}, received(s.Context())))
		}}},
	}, f)
	l := testkit.Listen(t)
	f.addr = l.Addr().String()
	served := make(chan error, 1)
	go func() { served <- server.Serve(f.Listener(l)) }() // ends with Stop
	t.Cleanup(func() {
		server.Stop()
		require.NoError(t, <-served)
		testkit.Eventually(t, func() bool { return f.count() == 0 }, "the end of every connection")
		testkit.Eventually(t, func() bool { used, _, _ := f.memory.Used(); return used == 0 }, "the memory of what was sent")
	})
	return f
}

// secure has connections encrypted.
func secure(t *testing.T, f *fixture) {
	t.Helper()
	dir := t.TempDir()
	_, err := identity.WriteCertificates(dir, nil, "alice")
	require.NoError(t, err)
	id, err := identity.NewServer(identity.ServerFiles{
		Cert: filepath.Join(dir, identity.ServerFile), Key: filepath.Join(dir, identity.ServerKeyFile),
	}, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	f.creds = id.Credentials()
	f.tls = &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}
}

// secureOr has connections encrypted, or not.
func secureOr(t *testing.T, yes bool) func(*Config, *fixture) {
	return func(_ *Config, f *fixture) {
		if yes {
			secure(t, f)
		}
	}
}

// count returns how many connections there are.
func (f *fixture) count() int {
	f.Set.mu.Lock()
	defer f.Set.mu.Unlock()
	return f.accepted
}

// accepts waits until so many connections are there.
func (f *fixture) accepts(t *testing.T, n int) {
	t.Helper()
	testkit.Eventually(t, func() bool { return f.count() == n }, "connections")
}

// Write keeps what is logged.
func (f *fixture) Write(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.text.Write(p)
}

// lines returns how many lines of the log say something.
func (f *fixture) lines(of string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return strings.Count(f.text.String(), of)
}

// receivedKey is the context key of the account of an RPC.
type receivedKey struct{}

func received(ctx context.Context) *inbound.RPC {
	rpc, _ := ctx.Value(receivedKey{}).(*inbound.RPC)
	return rpc
}

func (f *fixture) tap(ctx context.Context, info *tap.Info) (context.Context, error) {
	if f.reject != nil {
		if err := f.reject(ctx, info.FullMethodName); err != nil {
			From(ctx).Reject()
			return ctx, err
		}
	}
	inner, cancel := context.WithCancel(ctx)
	rpc, room := From(ctx).Inbound.Open(info.Header, func(error) { cancel() })
	if !room {
		cancel()
		return ctx, inbound.ErrMemory
	}
	context.AfterFunc(inner, rpc.Cancelled)
	return context.WithValue(inner, receivedKey{}, rpc), nil
}

// accounted is a stream whose messages are consumed.
type accounted struct{ grpc.ServerStream }

func (a accounted) RecvMsg(m any) error {
	err := a.ServerStream.RecvMsg(m)
	received(a.Context()).Next()
	return err
}

// statistics are gRPC's events about connections and RPCs.
type statistics struct{ *Set }

func (statistics) HandleRPC(ctx context.Context, event stats.RPCStats) {
	switch event.(type) {
	case *stats.InHeader:
		received(ctx).Begun()
	case *stats.End:
		received(ctx).End()
	}
}

// client returns a connection of gRPC, whose windows do not grow.
func (f *fixture) client(t *testing.T) *grpc.ClientConn {
	t.Helper()
	creds := insecure.NewCredentials()
	if f.tls != nil {
		creds = credentials.NewTLS(f.tls)
	}
	conn, err := grpc.NewClient(f.addr, grpc.WithContextDialer(testkit.Dial), grpc.WithTransportCredentials(creds),
		grpc.WithInitialWindowSize(64<<10), grpc.WithInitialConnWindowSize(64<<10))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// stream opens a stream of frames.
func stream(t *testing.T, conn *grpc.ClientConn) *wire.Conn {
	t.Helper()
	s, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, "/test.Service/Frames", grpc.ForceCodecV2(wire.Codec{}))
	require.NoError(t, err)
	return wire.NewConn(s, nil)
}

// echo sends an RPC, which its connection serves.
func echo(t *testing.T, conn *grpc.ClientConn, data []byte) error {
	t.Helper()
	var got wrapperspb.BytesValue
	err := conn.Invoke(t.Context(), "/test.Service/Echo", &wrapperspb.BytesValue{Value: data}, &got)
	if err == nil {
		require.Equal(t, data, got.GetValue())
	}
	return err
}

// dial connects without a word inside of TLS.
func (f *fixture) dial(t *testing.T) net.Conn {
	t.Helper()
	c, err := testkit.Dial(t.Context(), f.addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	if f.tls == nil {
		return c
	}
	s := tls.Client(c, f.tls)
	require.NoError(t, s.HandshakeContext(t.Context()))
	return s
}

// ends waits until the server has closed a connection, and returns what it has sent before.
func ends(t *testing.T, c net.Conn) string {
	t.Helper()
	sent, err := io.ReadAll(c)
	if !errors.Is(err, io.ErrUnexpectedEOF) { // of TLS: there is no alert
		require.NoError(t, err)
	}
	return string(sent)
}
