package identity

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/credentials"
)

// ServerFiles names the files that secure a server, all in PEM except Tokens. Without
// ClientCA and Tokens, every client is let in, without a name.
type ServerFiles struct {
	// Cert is the server's certificate, followed by the intermediate certificates; Key is
	// its private key.
	Cert, Key string
	// ClientCA has the authorities of client certificates; "" means that client
	// certificates are ignored.
	ClientCA string
	// Tokens has a token in each line, which the name of its owner may precede; "" means
	// that tokens are ignored.
	Tokens string
}

// Server secures the connections of a server. Each of its files has a value of its own: one
// that cannot be read does not keep another from being read again.
type Server struct {
	files   ServerFiles
	log     *slog.Logger
	pair    watched[tls.Certificate]
	clients watched[*x509.CertPool]
	tokens  watched[map[[sha256.Size]byte]string]
	cores   chan struct{} // has an element for each handshake that uses a core
}

// NewServer reads the files. Later, when they have changed and cannot be read, it logs that
// to log.
func NewServer(files ServerFiles, log *slog.Logger) (*Server, error) {
	s := &Server{files: files, log: log, cores: make(chan struct{}, max(1, runtime.GOMAXPROCS(0)-1))}
	s.pair.paths = []string{files.Cert, files.Key}
	s.pair.make = s.readPair
	s.clients.paths = []string{files.ClientCA}
	s.clients.make = func() (*x509.CertPool, error) { return authorities(files.ClientCA) }
	s.tokens.paths = []string{files.Tokens}
	s.tokens.make = s.readTokens
	_, err := s.pair.get()
	if err == nil && files.ClientCA != "" {
		_, err = s.clients.get()
	}
	if err == nil && files.Tokens != "" {
		_, err = s.tokens.get()
	}
	return s, err
}

// readPair reads the server's certificate. One that has expired is a mistake at the start;
// later it is logged, because the one before it may be about to expire, too.
func (s *Server) readPair() (tls.Certificate, error) {
	pair, err := keyPair(s.files.Cert, s.files.Key)
	if err != nil || time.Now().Before(pair.Leaf.NotAfter) {
		return pair, err
	}
	err = fmt.Errorf("identity: %s expired on %s; make a new one", s.files.Cert, pair.Leaf.NotAfter.UTC().Format(time.RFC3339))
	if !s.pair.made {
		return pair, err
	}
	s.log.Warn("the server's certificate has changed and is used, but clients will refuse it", slog.String("error", err.Error()))
	return pair, nil
}

// readTokens returns the names of the tokens' owners. A file that has lost its last token
// revokes it; at the start it is a mistake.
func (s *Server) readTokens() (map[[sha256.Size]byte]string, error) {
	all, err := readTokens(s.files.Tokens)
	if err != nil {
		return nil, err
	}
	if len(all) == 0 && !s.tokens.made {
		return nil, noToken(s.files.Tokens)
	}
	names := make(map[[sha256.Size]byte]string, len(all))
	for _, t := range all {
		names[digest(t.text)] = t.name
	}
	return names, nil
}

// current returns a value of the server's files.
func current[T any](s *Server, w *watched[T]) T {
	value, err := w.get()
	if err != nil {
		s.log.Warn("certificates, keys or tokens have changed and cannot be read; the previous ones stay in force", slog.String("error", err.Error()))
	}
	return value
}

// Open reports whether clients are let in without a name.
func (s *Server) Open() bool { return s.files.ClientCA == "" && s.files.Tokens == "" }

// Config returns a config for other listeners, which must check their peers with Handler.
func (s *Server) Config() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return s.config(), nil }}
}

// config returns the config of one handshake. It accepts any client certificate: Principal
// checks it and says what is wrong, which a TLS alert cannot.
func (s *Server) config() *tls.Config {
	cfg := &tls.Config{Certificates: []tls.Certificate{current(s, &s.pair)}, MinVersion: tls.VersionTLS13, SessionTicketsDisabled: true}
	if s.files.ClientCA != "" {
		cfg.ClientAuth = tls.RequestClientCert
		cfg.VerifyConnection = checkSize
	}
	return cfg
}

// checkSize refuses a client that sends more certificates, or more with them, than it needs
// to be known.
func checkSize(state tls.ConnectionState) error {
	n, size := len(state.PeerCertificates), len(state.OCSPResponse)
	for _, c := range state.PeerCertificates {
		size += len(c.Raw)
	}
	for _, t := range state.SignedCertificateTimestamps {
		size += len(t)
	}
	if n > chainCerts || len(state.SignedCertificateTimestamps) > chainCerts || size > chainBytes {
		return fmt.Errorf("identity: the client has %d certificates, of %d bytes with what belongs to them; the limits are %d and %d", n, size, chainCerts, chainBytes)
	}
	return nil
}

// peerInfo is the AuthInfo of a connection.
type peerInfo struct {
	credentials.TLSInfo
	checked atomic.Pointer[verdict] // of the certificate
}

// verdict is the result of checking a client certificate.
type verdict struct {
	by    *x509.CertPool
	until time.Time // the earliest expiry in the chain
	name  string
}

// Principal returns the name of the sender of an RPC: that of its token or its client
// certificate. info is the AuthInfo of the connection, authorization the values of the
// RPC's authorization metadata. An error is a *RefusedError.
func (s *Server) Principal(info credentials.AuthInfo, authorization []string) (name string, err error) {
	p, ok := info.(*peerInfo)
	if !ok {
		return "", refused("the connection is not encrypted")
	}
	return s.principal(p.State.PeerCertificates, &p.checked, authorization)
}

func (s *Server) principal(certs []*x509.Certificate, checked *atomic.Pointer[verdict], authorization []string) (name string, err error) {
	if s.Open() {
		return "", nil
	}
	if len(authorization) > 0 && s.files.Tokens != "" {
		scheme, text, _ := strings.Cut(authorization[0], " ")
		if name, ok := current(s, &s.tokens)[digest(text)]; ok && strings.EqualFold(scheme, "bearer") {
			return name, nil
		}
		return "", refused("the server does not know the token; ask its operator for one")
	}
	if len(certs) > 0 && s.files.ClientCA != "" {
		roots := current(s, &s.clients)
		if v := checked.Load(); v != nil && v.by == roots && time.Now().Before(v.until) {
			return v.name, nil
		}
		v, err := judge(certs, roots)
		if err != nil {
			return "", err
		}
		checked.Store(v)
		return v.name, nil
	}
	switch {
	case s.files.ClientCA == "":
		return "", refused(`the server wants a token; send it as metadata, "authorization: Bearer TOKEN"`)
	case s.files.Tokens == "":
		return "", refused("the server wants a client certificate")
	default:
		return "", refused(`the server wants a client certificate, or a token as metadata, "authorization: Bearer TOKEN"`)
	}
}

// Handler checks the sender of each HTTP request on a connection of Config, as Principal
// does for RPCs, and then calls h or refuses the request.
func (s *Server) Handler(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := s.principal(r.TLS.PeerCertificates, new(atomic.Pointer[verdict]), r.Header.Values("Authorization")); err != nil {
			http.Error(w, strings.TrimPrefix(err.Error(), "identity: "), http.StatusUnauthorized)
			return
		}
		h.ServeHTTP(w, r)
	})
}

// judge checks a client certificate, which its intermediate certificates follow.
func judge(certs []*x509.Certificate, roots *x509.CertPool) (*verdict, error) {
	between := x509.NewCertPool()
	for _, c := range certs[1:] {
		between.AddCert(c)
	}
	chains, err := certs[0].Verify(x509.VerifyOptions{Roots: roots, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	if err != nil {
		return nil, refused("client certificate: %s", certError(err, "that the server knows"))
	}
	v := &verdict{by: roots, name: certs[0].Subject.CommonName, until: certs[0].NotAfter}
	if v.name == "" && len(certs[0].DNSNames) > 0 {
		v.name = certs[0].DNSNames[0]
	}
	if v.name == "" {
		return nil, refused("client certificate: it has no name; give it a common name")
	}
	for _, c := range chains[0] {
		if c.NotAfter.Before(v.until) {
			v.until = c.NotAfter
		}
	}
	return v, nil
}

// Credentials returns the credentials with which gRPC secures connections. Handshakes leave
// one core to other work.
func (s *Server) Credentials() credentials.TransportCredentials { return serverCredentials{s} }

type serverCredentials struct{ *Server }

// ServerHandshake secures a connection.
func (s serverCredentials) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	h := &handshaking{Conn: raw, cores: s.cores}
	s.cores <- struct{}{}
	conn, info, err := credentials.NewTLS(s.config()).ServerHandshake(h)
	h.over = true
	<-s.cores
	if err != nil {
		if after, plain := strings.CutPrefix(string(h.first), http2.ClientPreface); plain {
			refusePlain(raw, after)
			err = errors.New("identity: the client does not speak TLS")
		}
		return nil, nil, err
	}
	return conn, &peerInfo{TLSInfo: info.(credentials.TLSInfo)}, nil
}

// ClientHandshake fails: these are server credentials.
func (serverCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("identity: server credentials cannot secure a client")
}

// Info describes the protocol.
func (serverCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}

// Clone returns s.
func (s serverCredentials) Clone() credentials.TransportCredentials { return s }

// OverrideServerName does nothing.
func (serverCredentials) OverrideServerName(string) error { return nil }

// handshaking is a connection in its handshake, which occupies a core except while it waits
// for the peer.
type handshaking struct {
	net.Conn
	cores chan struct{}
	first []byte // what was read first
	bytes int    // what was read
	over  bool
}

// Read releases the core until data has arrived.
func (h *handshaking) Read(p []byte) (int, error) {
	if h.over {
		return h.Conn.Read(p)
	}
	<-h.cores
	n, err := h.Conn.Read(p)
	h.cores <- struct{}{} // soon: no one holds a core while waiting for a peer
	if m := min(len(h.first), len(http2.ClientPreface)); string(h.first[:m]) == http2.ClientPreface[:m] {
		h.first = append(h.first, p[:n]...) // it may be HTTP/2 without TLS
	}
	if h.bytes += n; h.bytes > handshakeBytes {
		return 0, fmt.Errorf("identity: the client sent more than %d bytes during its handshake", handshakeBytes)
	}
	return n, err
}

// Close does nothing during the handshake, and leaves the connection to the caller: a
// client that does not speak TLS is told so first.
func (h *handshaking) Close() error {
	if !h.over {
		return nil
	}
	return h.Conn.Close()
}

// certError says what is wrong with a certificate.
func certError(err error, authority string) string {
	var unknown x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	var name x509.HostnameError
	switch {
	case errors.As(err, &unknown):
		return "it is not signed by an authority " + authority
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		now := time.Now()
		if now.Before(invalid.Cert.NotBefore) {
			return fmt.Sprintf("it is not valid before %s; is a clock wrong?", invalid.Cert.NotBefore.UTC().Format(time.RFC3339))
		}
		return fmt.Sprintf("it expired on %s", invalid.Cert.NotAfter.UTC().Format(time.RFC3339))
	case errors.As(err, &invalid) && invalid.Reason == x509.IncompatibleUsage:
		return "it is not for this use: a server's certificate is not valid for a client, and vice versa"
	case errors.As(err, &name):
		names := append([]string{}, name.Certificate.DNSNames...)
		for _, ip := range name.Certificate.IPAddresses {
			names = append(names, ip.String())
		}
		return fmt.Sprintf("it is for %s, not for %s", strings.Join(names, ", "), name.Host)
	}
	return strings.TrimPrefix(strings.TrimPrefix(err.Error(), "tls: "), "x509: ")
}
