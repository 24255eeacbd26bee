package server_test

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/server"
)

const theToken = "0123456789abcdef0123456789abcdef"

// secured is a server that wants a token or a certificate.
type secured struct {
	*fixture
	dir string
}

func serveSecured(t testing.TB, change func(*server.Config)) secured {
	t.Helper()
	dir, id := newIdentity(t)
	return secured{serve(t, func(cfg *server.Config) {
		cfg.Credentials, cfg.Identify, cfg.Reflection = id.Credentials(), id.Principal, true
		if change != nil {
			change(cfg)
		}
	}), dir}
}

// newIdentity makes certificates and a token in a folder, and the identity of a server.
func newIdentity(t testing.TB) (dir string, id *identity.Server) {
	t.Helper()
	dir = t.TempDir()
	_, err := identity.WriteCertificates(dir, nil, "alice")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "tokens"), []byte("bob "+theToken), 0o600))
	id, err = identity.NewServer(identity.ServerFiles{
		Cert: filepath.Join(dir, identity.ServerFile), Key: filepath.Join(dir, identity.ServerKeyFile),
		ClientCA: filepath.Join(dir, identity.AuthorityFile), Tokens: filepath.Join(dir, "tokens"),
	}, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	return dir, id
}

// config is a client's, with a token or without.
func (s secured) config(t testing.TB, token bool) (cfg client.Config) {
	t.Helper()
	f := identity.ClientFiles{CA: filepath.Join(s.dir, identity.AuthorityFile)}
	if token {
		f.Token = filepath.Join(s.dir, "tokens")
	}
	var err error
	cfg.Credentials, cfg.PerRPC, err = f.Credentials()
	require.NoError(t, err)
	return cfg
}

func TestNothingIsServedToNobodyKnowsWhom(t *testing.T) {
	testkit.Start(t)
	s := serveSecured(t, nil)
	conn, err := grpc.NewClient(s.addr, grpc.WithTransportCredentials(s.config(t, false).Credentials))
	require.NoError(t, err)
	defer conn.Close()
	for _, svc := range []grpc.ServiceDesc{pb.TensorService_ServiceDesc, healthpb.Health_ServiceDesc} {
		for _, m := range svc.Methods {
			err := conn.Invoke(t.Context(), "/"+svc.ServiceName+"/"+m.MethodName, &pb.GetServiceInfoRequest{}, &pb.GetServiceInfoResponse{})
			require.Equal(t, codes.Unauthenticated, status.Code(err), "%s: %v", m.MethodName, err)
		}
	}
	for _, method := range []string{
		pb.TensorService_StreamTensors_FullMethodName, pb.TensorService_PushTensors_FullMethodName, pb.TensorService_PullTensors_FullMethodName,
		"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "/no.such/Method",
	} {
		stream, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method)
		require.NoError(t, err)
		require.NoError(t, stream.CloseSend())
		err = stream.RecvMsg(&pb.Frame{})
		require.Equal(t, codes.Unauthenticated, status.Code(err), "%s: %v", method, err)
		require.ErrorContains(t, err, "the server wants a client certificate, or a token")
	}
	c := s.counters(t)
	require.Zero(t, c["sessions_total"]+c["calls_total"]+c["receive_ended_total"])
	require.Greater(t, c["unauthenticated_total"], int64(5))
}

func TestAPrincipalIsKnownToHandlers(t *testing.T) {
	testkit.Start(t)
	names := make(chan string, 1)
	s := serveSecured(t, func(cfg *server.Config) {
		cfg.UnaryInterceptors = []grpc.UnaryServerInterceptor{func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
			names <- server.Principal(ctx)
			return handler(ctx, req)
		}}
	})
	c, err := client.Dial(s.addr, s.config(t, true))
	require.NoError(t, err)
	defer c.Close()
	_, err = c.Models(t.Context())
	require.NoError(t, err)
	require.Equal(t, "bob", <-names)
}

func TestASessionEndsWhenItsTokenDoes(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		s := serveSecured(t, nil)
		cfg := s.config(t, true)
		conn, err := grpc.NewClient(s.addr, reach, grpc.WithAuthority("127.0.0.1"), grpc.WithTransportCredentials(cfg.Credentials), grpc.WithPerRPCCredentials(cfg.PerRPC))
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, conn.Close()) })
		session := func() *raw {
			r, err := rawOn(t, conn)
			require.NoError(t, err)
			r.greet()
			r.good()
			return r
		}
		r := session()
		next := filepath.Join(s.dir, "next")
		require.NoError(t, os.WriteFile(next, []byte("carol another-token-of-some-length"), 0o600))
		require.NoError(t, os.Rename(next, filepath.Join(s.dir, "tokens")))
		st := r.status()
		require.Equal(t, codes.Unauthenticated, st.Code(), st.Message())
		require.Contains(t, st.Message(), "the server does not know the token")
		session() // the client reads its own file again
	})
}

func TestWhoDoesNotSpeakTLSIsTold(t *testing.T) {
	testkit.Start(t)
	s := serveSecured(t, nil)
	conn, err := grpc.NewClient(s.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer conn.Close()
	_, err = pb.NewTensorServiceClient(conn).ListModels(t.Context(), &pb.ListModelsRequest{})
	require.Equal(t, codes.Unauthenticated, status.Code(err), "%v", err)
	require.ErrorContains(t, err, "the server speaks TLS only")
	raw, err := net.Dial("tcp", s.addr)
	require.NoError(t, err)
	_, err = raw.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
	require.NoError(t, err)
	_, err = raw.Read(make([]byte, 1))
	require.Error(t, err)
	require.NoError(t, raw.Close())
	testkit.Eventually(t, func() bool { return s.counters(t)["handshakes_failed_total"] == 2 }, "the failed handshakes")

	plain := serve(t, nil)
	c, err := client.Dial(plain.addr, s.config(t, false))
	require.NoError(t, err)
	defer c.Close()
	_, err = c.Models(t.Context())
	require.Equal(t, codes.Unauthenticated, status.Code(err), "%v", err)
	require.ErrorContains(t, err, "the server does not speak TLS")
}

// A server that stops, or has no room for the connection, is no wrong one: another try may help.
func TestAConnectionThatEndsInItsHandshakeIsNotARefusal(t *testing.T) {
	testkit.Start(t)
	s := serveSecured(t, nil)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var closing sync.WaitGroup
	closing.Go(func() { // ends with the listener
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Read(make([]byte, 4096))
			_ = conn.Close()
		}
	})
	stock := client.Config{Credentials: credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13})}
	for text, cfg := range map[string]client.Config{"closed the connection before it was encrypted": s.config(t, true), "EOF": stock} {
		c, err := client.Dial(l.Addr().String(), cfg)
		require.NoError(t, err)
		_, err = c.Models(t.Context())
		require.Equal(t, codes.Unavailable, status.Code(err), "%v", err)
		require.ErrorContains(t, err, text)
		require.NoError(t, c.Close())
	}
	require.NoError(t, l.Close())
	closing.Wait()
}

func TestWhoIsSomebodyElseNowLosesItsRPCs(t *testing.T) {
	testkit.Start(t)
	bubble(t, func(t *testing.T) {
		var name atomic.Value
		var asked atomic.Int64
		name.Store("alice")
		f := serve(t, func(c *server.Config) {
			c.Identify = func(credentials.AuthInfo, []string) (string, error) {
				asked.Add(1)
				return name.Load().(string), nil
			}
		})
		r, err := rawOn(t, f.dial(t))
		require.NoError(t, err)
		r.greet()
		r.good()
		before := asked.Load()
		testkit.Eventually(t, func() bool { return asked.Load() > before }, "the next look")
		require.Zero(t, f.counters(t)["rpcs_failed_total"])
		name.Store("intern")
		st := r.status()
		require.Equal(t, codes.Unauthenticated, st.Code(), st.Message())
		require.Contains(t, st.Message(), "of another principal now")
	})
}
