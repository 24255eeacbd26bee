package client_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/credentials"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/identity"
)

// laneTokens is how many tokens there are that can be revoked.
const laneTokens = 25 * laneWorkers

// laneKeys are what the clients, the servers and the proxy of a laneWorld show each other.
// A nil one is that of a world without TLS.
type laneKeys struct {
	dir    string
	change func(*serverConfig)
	roots  *x509.CertPool
	pairs  [][2]tls.Certificate // of each worker, one newer than the other

	mu      sync.Mutex
	shown   *tls.Certificate // the server's, as the proxy has it; guarded by mu
	tokens  []string         // guarded by mu
	revoked map[string]bool  // guarded by mu
}

func newLaneKeys(t *testing.T) *laneKeys {
	t.Helper()
	k := &laneKeys{revoked: map[string]bool{}}
	for i := range laneTokens {
		k.tokens = append(k.tokens, fmt.Sprintf("%032x", i))
	}
	k.dir, k.change = secured(t, k.tokens...)
	for i := range laneWorkers {
		var both [2]tls.Certificate
		for j := range both {
			name := fmt.Sprint("worker", i)
			_, err := identity.WriteCertificates(k.dir, nil, name)
			require.NoError(t, err)
			both[j] = certificate(t, k.dir, name)
		}
		k.pairs = append(k.pairs, both)
	}
	ca, err := os.ReadFile(filepath.Join(k.dir, identity.AuthorityFile))
	require.NoError(t, err)
	k.roots = x509.NewCertPool()
	require.True(t, k.roots.AppendCertsFromPEM(ca))
	shown := certificate(t, k.dir, "server")
	k.shown = &shown
	return k
}

// config is that of a client with a certificate, or without.
func (k *laneKeys) config(pair *tls.Certificate) *tls.Config {
	cfg := &tls.Config{RootCAs: k.roots, ServerName: "localhost", NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS13}
	if pair != nil {
		cfg.Certificates = []tls.Certificate{*pair}
	}
	return cfg
}

// client is a client's config with the older certificate of a worker.
func (k *laneKeys) client(i int) (cfg client.Config) {
	if k != nil {
		cfg.Credentials = credentials.NewTLS(k.config(&k.pairs[i][0]))
	}
	return cfg
}

// worker is the config of a worker's client, with a token or a certificate, old or new.
func (k *laneKeys) worker(i int, bears bool, age int) (cfg client.Config, certified bool, token string) {
	if k == nil {
		return cfg, false, ""
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for i < laneTokens && k.revoked[k.tokens[i]] {
		i += laneWorkers
	}
	if bears && i < laneTokens {
		return client.Config{Credentials: credentials.NewTLS(k.config(nil)), PerRPC: bearer(k.tokens[i])}, false, k.tokens[i]
	}
	return client.Config{Credentials: credentials.NewTLS(k.config(&k.pairs[i%laneWorkers][age]))}, true, ""
}

// bearer is a token that is sent with each RPC.
type bearer string

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}

func (bearer) RequireTransportSecurity() bool { return true }

// find returns which certificate a worker has shown.
func (k *laneKeys) find(leaf *x509.Certificate) (worker, age int) {
	for i, both := range k.pairs {
		for j, pair := range both {
			if pair.Leaf.Equal(leaf) {
				return i, j
			}
		}
	}
	panic("nobody has " + leaf.Subject.CommonName + "'s certificate")
}

// pairOf returns a certificate that a worker has shown, with its key; nil if it had none.
func (k *laneKeys) pairOf(leaf *x509.Certificate) *tls.Certificate {
	if leaf == nil {
		return nil
	}
	i, j := k.find(leaf)
	return &k.pairs[i][j]
}

// rotated returns another certificate of the same worker.
func (k *laneKeys) rotated(leaf *x509.Certificate) *tls.Certificate {
	i, j := k.find(leaf)
	return &k.pairs[i][1-j]
}

// another returns one of another worker.
func (k *laneKeys) another(leaf *x509.Certificate) *tls.Certificate {
	i, j := k.find(leaf)
	return &k.pairs[(i+1)%laneWorkers][j]
}

// rotate gives the server another certificate, and returns it.
func (k *laneKeys) rotate(t *testing.T) *tls.Certificate {
	k.mu.Lock()
	defer k.mu.Unlock()
	_, err := identity.WriteCertificates(k.dir, []string{"ferry.example.org"}, "spare")
	pair, failed := tls.LoadX509KeyPair(filepath.Join(k.dir, identity.ServerFile), filepath.Join(k.dir, identity.ServerKeyFile))
	if err != nil || failed != nil {
		t.Errorf("the server's certificate cannot be rotated: %v, %v", err, failed)
	}
	k.shown = &pair
	return k.shown
}

// showing returns what the server shows now.
func (k *laneKeys) showing() *tls.Certificate {
	if k == nil {
		return nil
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.shown
}

// revoke takes a token from the server's file.
func (k *laneKeys) revoke(t *testing.T, token string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.revoked[token] = true
	var left []string
	for _, token := range k.tokens {
		if !k.revoked[token] {
			left = append(left, token)
		}
	}
	next := filepath.Join(k.dir, "next")
	err := os.WriteFile(next, []byte(strings.Join(left, "\n")), 0o600)
	if err == nil {
		err = os.Rename(next, filepath.Join(k.dir, "tokens"))
	}
	if err != nil {
		t.Errorf("a token cannot be revoked: %v", err)
	}
}

// isRevoked reports whether a token has been revoked; "" never is.
func (k *laneKeys) isRevoked(token string) bool {
	if k == nil {
		return false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.revoked[token]
}

// below is a connection of the proxy below TLS.
type below struct {
	net.Conn
	shown *tls.Certificate                                       // to a client
	once  atomic.Pointer[func(to net.Conn, record []byte) error] // writes the next record, if not nil
}

// Write writes a record.
func (b *below) Write(record []byte) (int, error) {
	if way := b.once.Swap(nil); way != nil {
		return len(record), (*way)(b.Conn, record)
	}
	return b.Conn.Write(record)
}

// meet is the server's side of a connection that a client has opened.
func (k *laneKeys) meet(c net.Conn) net.Conn {
	k.mu.Lock()
	defer k.mu.Unlock()
	return tls.Server(&below{Conn: c, shown: k.shown}, &tls.Config{
		Certificates: []tls.Certificate{*k.shown}, ClientAuth: tls.RequestClientCert, NextProtos: []string{"h2"},
		MinVersion: tls.VersionTLS13, SessionTicketsDisabled: true,
	})
}

// secure is the client's side of a connection to a server.
func (k *laneKeys) secure(c net.Conn, pair *tls.Certificate) net.Conn {
	return tls.Client(&below{Conn: c}, k.config(pair))
}

// leafOf returns the certificate of a client, after the handshake; nil if it has none.
func leafOf(c net.Conn) *x509.Certificate {
	if c, ok := c.(*tls.Conn); ok {
		if all := c.ConnectionState().PeerCertificates; len(all) > 0 {
			return all[0]
		}
	}
	return nil
}

// socket returns the connection below TLS, if there is TLS.
func socket(c net.Conn) *net.TCPConn {
	if c, ok := c.(*tls.Conn); ok {
		return c.NetConn().(*below).Conn.(*net.TCPConn)
	}
	return c.(*net.TCPConn)
}

// hangUp closes a connection without telling TLS, which may wait for the peer.
func hangUp(c net.Conn) {
	if c, ok := c.(*tls.Conn); ok {
		_ = c.NetConn().Close()
		return
	}
	_ = c.Close()
}
