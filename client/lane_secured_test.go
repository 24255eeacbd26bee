package client_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/credentials"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// secured makes certificates, of alice and bob, and a token of carol's, and has a server
// want one of them, or of others.
func secured(t *testing.T, others ...string) (dir string, change func(*serverConfig)) {
	t.Helper()
	dir = t.TempDir()
	for _, name := range []string{"alice", "bob"} {
		_, err := identity.WriteCertificates(dir, nil, name)
		require.NoError(t, err)
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "tokens"), []byte(strings.Join(append([]string{"carol 0123456789abcdef0123456789abcdef"}, others...), "\n")), 0o600))
	id, err := identity.NewServer(identity.ServerFiles{
		Cert: filepath.Join(dir, identity.ServerFile), Key: filepath.Join(dir, identity.ServerKeyFile),
		ClientCA: filepath.Join(dir, identity.AuthorityFile), Tokens: filepath.Join(dir, "tokens"),
	}, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	return dir, func(c *serverConfig) { c.Credentials, c.Identify = id.Credentials(), id.Principal }
}

// certificate reads a client's.
func certificate(t *testing.T, dir, name string) tls.Certificate {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, name+".pem"), filepath.Join(dir, name+"-key.pem"))
	require.NoError(t, err)
	return pair
}

func TestLargeTensorsGoByALaneWithAnyCredentials(t *testing.T) {
	testkit.Start(t)
	dir, change := secured(t)
	files := func(f identity.ClientFiles) (cfg client.Config) {
		t.Helper()
		f.CA = filepath.Join(dir, identity.AuthorityFile)
		var err error
		cfg.Credentials, cfg.PerRPC, err = f.Credentials()
		require.NoError(t, err)
		return cfg
	}
	of := func(name string) identity.ClientFiles {
		return identity.ClientFiles{Cert: filepath.Join(dir, name+".pem"), Key: filepath.Join(dir, name+"-key.pem")}
	}
	for name, tc := range map[string]struct {
		network string
		cfg     client.Config
	}{
		"a certificate":               {"tcp", files(of("alice"))},
		"a token":                     {"tcp", files(identity.ClientFiles{Token: filepath.Join(dir, "tokens")})},
		"a token, over a Unix socket": {"unix", files(identity.ClientFiles{Token: filepath.Join(dir, "tokens")})},
		"credentials of gRPC itself":  {"tcp", client.Config{Credentials: credentials.NewTLS(&tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{certificate(t, dir, "bob")}})}},
		"credentials that name the server": {"tcp", client.Config{Credentials: credentials.NewTLS(&tls.Config{
			ServerName: "nobody", InsecureSkipVerify: true, Certificates: []tls.Certificate{certificate(t, dir, "bob")},
		})}},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Start(t)
			f := startServer(t, tc.network, tc.cfg, change)
			s := f.session(t)
			for _, n := range []int{16 * mib, 5*mib + 1} {
				x := large(t, n, uint64(n))
				for w := (client.Ways{}); w.LaneSentBytes == 0 || w.LaneReceivedBytes == 0; w = s.Ways() { // it is opened beside the first call
					y, err := s.Compute(t.Context(), "echo", x)
					require.NoError(t, err)
					require.True(t, bytes.Equal(x.Data, y.Data))
				}
			}
			require.True(t, s.Ways().Lanes > 0)
			info, err := f.client.Info(t.Context())
			require.NoError(t, err)
			require.EqualValues(t, 1, info.Counters["lanes"])
			require.EqualValues(t, s.Ways().LaneSentBytes, info.Counters["lane_received_bytes_total"])
			require.NoError(t, s.Close())
			testkit.Eventually(t, func() bool {
				info, err := f.client.Info(t.Context())
				return err == nil && info.Counters["lanes"] == 0
			}, "the lane ends with its session")
			x := large(t, 16*mib, 7)
			in := client.From("", x)
			in.Name = "x"
			_, err = f.client.Push(t.Context(), client.PushRequest{Tensors: []client.Input{in}})
			require.NoError(t, err)
			to := make([]byte, len(x.Data))
			_, err = f.client.Pull(t.Context(), client.PullRequest{
				Select: []client.Selection{{Name: "x"}},
				To:     func(string, tensor.Desc) (client.Sink, error) { return client.Into(to), nil },
			})
			require.NoError(t, err)
			require.True(t, bytes.Equal(x.Data, to))
		})
	}
}

// changing are credentials that have another certificate for each handshake.
type changing struct {
	credentials.TransportCredentials
	next *atomic.Int64
	all  []tls.Certificate
}

func (c changing) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	i := min(int(c.next.Add(1)), len(c.all)) - 1
	return credentials.NewTLS(&tls.Config{InsecureSkipVerify: true, Certificates: c.all[i : i+1]}).ClientHandshake(ctx, authority, raw)
}

func (c changing) Clone() credentials.TransportCredentials { return c }

func TestALaneNeedsTheNameOfItsSessionsCertificate(t *testing.T) {
	testkit.Start(t)
	dir, change := secured(t)
	alice, bob := certificate(t, dir, "alice"), certificate(t, dir, "bob")
	_, err := identity.WriteCertificates(dir, nil, "alice")
	require.NoError(t, err)
	rotated := certificate(t, dir, "alice")
	require.NotEqual(t, alice.Certificate, rotated.Certificate)
	with := func(all ...tls.Certificate) client.Config {
		return client.Config{Credentials: changing{credentials.NewTLS(nil), new(atomic.Int64), all}}
	}
	x := large(t, 8*mib, 1)
	t.Run("rotated", func(t *testing.T) {
		testkit.Start(t)
		f := startServer(t, "tcp", with(alice, rotated), change)
		testkit.Eventually(t, func() bool {
			echoed(t, f.client, x)
			return f.client.Ways().LaneReceivedBytes > 0
		}, "a lane")
	})
	t.Run("another's", func(t *testing.T) {
		testkit.Start(t)
		f := startServer(t, "tcp", with(alice, bob), change)
		testkit.Eventually(t, func() bool {
			echoed(t, f.client, x)
			return f.client.Ways().Why != "it is being opened"
		}, "a refusal")
		require.Contains(t, f.client.Ways().Why, "not one of the session's principal")
		require.Zero(t, f.client.Ways().LaneSentBytes)
		info, err := f.client.Info(t.Context())
		require.NoError(t, err)
		require.Positive(t, info.Counters["lanes_refused_total"])
	})
}
