package server_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"

	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

// client returns what a client with a certificate dials with; "" is none.
func (s secured) client(t testing.TB, name string) *tls.Config {
	t.Helper()
	ca, err := os.ReadFile(filepath.Join(s.dir, identity.AuthorityFile))
	require.NoError(t, err)
	cfg := &tls.Config{RootCAs: x509.NewCertPool(), NextProtos: []string{"h2"}, ServerName: "localhost", MinVersion: tls.VersionTLS13}
	require.True(t, cfg.RootCAs.AppendCertsFromPEM(ca))
	if name != "" {
		pair, err := tls.LoadX509KeyPair(filepath.Join(s.dir, name+".pem"), filepath.Join(s.dir, name+"-key.pem"))
		require.NoError(t, err)
		cfg.Certificates = []tls.Certificate{pair}
	}
	return cfg
}

// shake connects and encrypts.
func (s secured) shake(t *testing.T, name string) net.Conn {
	t.Helper()
	c, err := connect(t.Context(), s.addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(rawLife)))
	return tls.Client(c, s.client(t, name))
}

// openLaned opens a session, with a certificate or a token or both, that asks for lanes.
func (s secured) openLaned(t *testing.T, name, token string) *raw {
	t.Helper()
	conn, err := grpc.NewClient(s.addr, reach, grpc.WithAuthority("localhost"), grpc.WithTransportCredentials(credentials.NewTLS(s.client(t, name))),
		grpc.WithStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			if token != "" {
				ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
			}
			return streamer(ctx, desc, cc, method, opts...)
		}))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	r, err := rawOn(t, conn)
	require.NoError(t, err)
	r.greetLaned()
	return r
}

func TestALaneIsOfItsSessionsPrincipal(t *testing.T) {
	testkit.Start(t)
	s := serveSecured(t, nil)
	for _, name := range []string{"alice2", "bob"} {
		_, err := identity.WriteCertificates(s.dir, nil, name)
		require.NoError(t, err)
	}
	elsewhere := t.TempDir()
	_, err := identity.WriteCertificates(elsewhere, nil, "alice")
	require.NoError(t, err)
	for from, to := range map[string]string{"alice.pem": "impostor.pem", "alice-key.pem": "impostor-key.pem"} {
		require.NoError(t, os.Rename(filepath.Join(elsewhere, from), filepath.Join(s.dir, to)))
	}
	for from, to := range map[string]string{"alice.pem": "first.pem", "alice-key.pem": "first-key.pem"} {
		require.NoError(t, os.Rename(filepath.Join(s.dir, from), filepath.Join(s.dir, to)))
	}
	_, err = identity.WriteCertificates(s.dir, nil, "alice") // rotated
	require.NoError(t, err)
	certified, known := s.openLaned(t, "first", ""), s.openLaned(t, "bob", theToken)
	const opened, unknown, used, foreign = 0, 1, 2, 4
	refused := int64(0)
	for _, tc := range []struct {
		what string
		of   *raw
		by   string
		use  uint64
		want int
	}{
		{"a stolen token, another certificate", certified, "bob", 0, foreign},
		{"a stolen token, no certificate", certified, "", 0, foreign},
		{"a stolen token, the name by another authority", certified, "impostor", 0, foreign},
		{"its own certificate", certified, "first", 0, opened},
		{"replayed", certified, "first", 0, used},
		{"replayed by another", certified, "bob", 0, foreign},
		{"a rotated certificate", certified, "alice", 1, opened},
		{"its RPC had a token, no certificate", known, "", 0, opened},
		{"its RPC had a token, any certificate", known, "alice2", 1, opened},
		{"replayed", known, "", 1, used},
	} {
		c := s.shake(t, tc.by)
		require.Equal(t, tc.want, sayLane(t, c, tc.of.hello.LaneToken, tc.use), tc.what)
		if tc.want != opened {
			refused++
			ends(t, c)
		}
	}
	c := s.shake(t, "alice")
	require.Equal(t, unknown, sayLane(t, c, make([]byte, 32), 0))
	ends(t, c)
	require.Equal(t, refused+1, s.counters(t)["lanes_refused_total"])
	certified.end()
	known.end()
	testkit.Eventually(t, func() bool { return s.counters(t)["lanes"] == 0 }, "the lanes end with their sessions")
}

func TestALaneOverTLSCarriesChunksAndEndsWithItsSession(t *testing.T) {
	testkit.Start(t)
	s := serveSecured(t, nil)
	r, c := s.openLaned(t, "alice", ""), s.shake(t, "alice")
	require.Zero(t, sayLane(t, c, r.hello.LaneToken, 255))
	o := offering("sink", testkit.Bytes(5*mib+1, 1), mib)
	r.open(o)
	for i := range o.count() {
		r.credit(o.desc.TensorId, i+1)
		p := r.chunk(o, i)
		write(t, c, laneHeader(p, len(p.Data)), p.Data)
	}
	require.Zero(t, r.done(o.call.Id).Code)
	require.EqualValues(t, len(o.data), s.counters(t)["lane_received_bytes_total"])
	r.end()
	ends(t, c)
}
