package identity

import (
	"bytes"
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
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"golang.org/x/net/http2"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/tensorferry/tensorferry/reason"
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
	pair    *watched[tls.Certificate]
	clients *watched[*x509.CertPool]               // nil without ClientCA
	tokens  *watched[map[[sha256.Size]byte]string] // nil without Tokens
	cores   chan struct{}                          // has an element for each handshake that uses a core
	warned  atomic.Int64                           // when it last logged that its certificate expires, in Unix seconds
}

// NewServer reads the files. Later it logs when they have changed, and whether they can be
// read, and that the certificate expires, in the last tenth of its time and after.
func NewServer(files ServerFiles, log *slog.Logger) (*Server, error) {
	s := &Server{files: files, log: log, cores: make(chan struct{}, max(1, runtime.GOMAXPROCS(0)-1))}
	for _, path := range []string{files.Key, files.Tokens} {
		if OthersRead(path) {
			log.Warn("other users can read a secret: chmod o-r", slog.String("file", path))
		}
	}
	var err error
	if s.pair, err = watch(log, s.readPair, files.Cert, files.Key); err != nil {
		return nil, err
	}
	s.warn(s.pair.get().Leaf)
	if files.ClientCA != "" {
		if s.clients, err = watch(log, s.readAuthorities, files.ClientCA); err != nil {
			return nil, err
		}
	}
	if files.Tokens != "" {
		s.tokens, err = watch(log, s.readTokens, files.Tokens)
	}
	return s, err
}

// readPair reads the server's certificate. One that has expired is a mistake at the start;
// later it is logged, because the one before it may be about to expire, too.
func (s *Server) readPair(again bool) (tls.Certificate, error) {
	pair, err := keyPair(s.files.Cert, s.files.Key)
	if err != nil {
		return pair, err
	}
	if len(pair.Leaf.DNSNames)+len(pair.Leaf.IPAddresses) == 0 {
		s.log.Warn("clients will refuse the server's certificate: it names no host (subjectAltName)", slog.String("file", s.files.Cert))
	}
	if time.Now().Before(pair.Leaf.NotAfter) {
		if again {
			s.log.Info("the server's certificate was read again", slog.String("file", s.files.Cert), slog.Time("expires", pair.Leaf.NotAfter))
		}
		return pair, nil
	}
	err = fmt.Errorf("identity: %s expired on %s; make a new one", s.files.Cert, pair.Leaf.NotAfter.UTC().Format(time.RFC3339))
	if !again {
		return pair, err
	}
	s.log.Warn("the server's certificate has changed and is used, but clients will refuse it", slog.String("error", err.Error()))
	return pair, nil
}

// readAuthorities reads those of clients' certificates.
func (s *Server) readAuthorities(again bool) (*x509.CertPool, error) {
	pool, err := authorities(s.files.ClientCA)
	if err == nil && again {
		s.log.Info("the authorities of clients were read again", slog.String("file", s.files.ClientCA))
	}
	return pool, err
}

// readTokens returns the names of the tokens' owners. A file that has lost its last token
// revokes it; at the start it is a mistake.
func (s *Server) readTokens(again bool) (map[[sha256.Size]byte]string, error) {
	all, err := readTokens(s.files.Tokens)
	if err != nil {
		return nil, err
	}
	if len(all) == 0 && !again {
		return nil, noToken(s.files.Tokens)
	}
	switch {
	case len(all) == 0:
		s.log.Warn("no token is left: clients that send one are refused", slog.String("file", s.files.Tokens))
	case again:
		s.log.Info("tokens were read again", slog.String("file", s.files.Tokens), slog.Int("tokens", len(all)))
	}
	names := make(map[[sha256.Size]byte]string, len(all))
	for _, t := range all {
		names[digest(t.text)] = t.name
	}
	return names, nil
}

// Reread reads the files now if they have changed, which the next client would do.
func (s *Server) Reread() {
	s.pair.reread()
	if s.clients != nil {
		s.clients.reread()
	}
	if s.tokens != nil {
		s.tokens.reread()
	}
}

// Open reports whether clients are let in without a name.
func (s *Server) Open() bool {
	return s.clients == nil && s.tokens == nil
}

// Config returns a config for other listeners, which must check their peers with Handler.
func (s *Server) Config() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return s.config(), nil }}
}

// config returns the config of one handshake. It accepts any client certificate: Principal
// checks it and says what is wrong, which a TLS alert cannot.
func (s *Server) config() *tls.Config {
	pair := s.pair.get()
	s.warn(pair.Leaf)
	cfg := &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13, SessionTicketsDisabled: true}
	if s.clients != nil {
		cfg.ClientAuth = tls.RequestClientCert
		cfg.VerifyConnection = checkSize
	}
	return cfg
}

// warn logs, every warnEvery, that the certificate expires.
func (s *Server) warn(c *x509.Certificate) {
	now := time.Now()
	last := s.warned.Load()
	if c.NotAfter.Sub(now) > c.NotAfter.Sub(c.NotBefore)/warnPart || now.Unix()-last < int64(warnEvery/time.Second) || !s.warned.CompareAndSwap(last, now.Unix()) {
		return
	}
	log := s.log.With(slog.String("file", s.files.Cert), slog.Time("expires", c.NotAfter))
	if now.After(c.NotAfter) {
		log.Warn("the server's certificate has expired: clients refuse it")
		return
	}
	log.Warn("the server's certificate expires soon")
}

// checkSize refuses a client that sends more certificates, or more with them, than it needs.
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
	client *evidence
}

// evidence is the certificate of a client, with the verdict on it.
type evidence struct {
	raw [][]byte // the certificate and the intermediate ones; parsed, they would take many times the memory

	mu    sync.Mutex     // held while checking: RPCs that come meanwhile wait for the verdict
	by    *x509.CertPool // the authorities that it was checked with; nil: it was not checked
	until time.Time
	name  string
	err   error
}

// newEvidence copies the certificates: they are parts of what the client has sent.
func newEvidence(certs []*x509.Certificate) *evidence {
	e := &evidence{}
	for _, c := range certs {
		e.raw = append(e.raw, bytes.Clone(c.Raw))
	}
	return e
}

// judge returns the name of the client, or why it is refused. It checks the certificate only
// if there is no verdict that holds.
func (e *evidence) judge(roots *x509.CertPool) (name string, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := time.Now()
	if e.by != roots || !now.Before(e.until) {
		e.by = roots
		if e.name, e.until, e.err = check(e.raw, roots); e.err != nil {
			e.until = now.Add(refusedFor)
		}
	}
	return e.name, e.err
}

// Principal returns the name of the sender of an RPC: that of its token or its client
// certificate. info is the AuthInfo of the connection, authorization the values of the
// RPC's authorization metadata. An error is a *RefusedError.
func (s *Server) Principal(info credentials.AuthInfo, authorization []string) (name string, err error) {
	p, ok := info.(*peerInfo)
	if !ok {
		return "", refused(reason.TLSRequired, "the connection is not encrypted")
	}
	return s.principal(p.client, authorization)
}

func (s *Server) principal(client *evidence, authorization []string) (name string, err error) {
	if s.Open() {
		return "", nil
	}
	if len(authorization) > 0 && s.tokens != nil {
		scheme, text, _ := strings.Cut(authorization[0], " ")
		if name, ok := s.tokens.get()[digest(text)]; ok && strings.EqualFold(scheme, "bearer") {
			return name, nil
		}
		return "", refused(reason.TokenUnknown, "the server does not know the token; ask its operator for one")
	}
	if len(client.raw) > 0 && s.clients != nil {
		return client.judge(s.clients.get())
	}
	switch {
	case s.clients == nil:
		return "", refused(reason.TokenRequired, `the server wants a token; send it as metadata, "authorization: Bearer TOKEN"`)
	case s.tokens == nil:
		return "", refused(reason.CertRequired, "the server wants a client certificate")
	default:
		return "", refused(reason.CredentialsRequired, `the server wants a client certificate, or a token as metadata, "authorization: Bearer TOKEN"`)
	}
}

// Handler checks the sender of each HTTP request on a connection of Config, as Principal
// does for RPCs, and then calls h or refuses the request.
func (s *Server) Handler(h http.Handler) http.Handler {
	var clients sync.Map // of *evidence by weak.Pointer[tls.ConnectionState]: the requests of a connection share it
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		connection := weak.Make(r.TLS)
		client, known := clients.Load(connection)
		if !known {
			if client, known = clients.LoadOrStore(connection, newEvidence(r.TLS.PeerCertificates)); !known {
				runtime.AddCleanup(r.TLS, func(c weak.Pointer[tls.ConnectionState]) { clients.Delete(c) }, connection)
			}
		}
		if _, err := s.principal(client.(*evidence), r.Header.Values("Authorization")); err != nil {
			http.Error(w, strings.TrimPrefix(err.Error(), "identity: "), http.StatusUnauthorized)
			return
		}
		h.ServeHTTP(w, r)
	})
}

// check returns the name in a client certificate, which intermediate ones follow, and the
// earliest expiry among those that vouch for it.
func check(raw [][]byte, roots *x509.CertPool) (name string, until time.Time, err error) {
	between := x509.NewCertPool()
	var leaf *x509.Certificate
	for i, der := range raw {
		c, err := x509.ParseCertificate(der)
		switch {
		case err != nil:
			return "", until, clients.refused(err, "")
		case i == 0:
			leaf = c
		default:
			between.AddCert(c)
		}
	}
	chains, err := leaf.Verify(x509.VerifyOptions{Roots: roots, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	if err != nil {
		return "", until, clients.refused(err, "that the server knows")
	}
	name = leaf.Subject.CommonName
	if name == "" && len(leaf.DNSNames) > 0 {
		name = leaf.DNSNames[0]
	}
	if name == "" {
		return "", until, refused(reason.CertUnknown, "client certificate: it has no name; give it a common name")
	}
	until = leaf.NotAfter
	for _, c := range chains[0] {
		if c.NotAfter.Before(until) {
			until = c.NotAfter
		}
	}
	return name, until, nil
}

// Credentials returns the credentials with which gRPC secures connections. Handshakes leave
// one core to other work.
func (s *Server) Credentials() credentials.TransportCredentials {
	return serverCredentials{credentials.NewTLS(s.Config()), s}
}

type serverCredentials struct {
	credentials.TransportCredentials // describes the protocol
	*Server
}

// ServerHandshake secures a connection.
func (s serverCredentials) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	h := &handshaking{Conn: raw, cores: s.cores}
	s.cores <- struct{}{}
	conn, info, err := credentials.NewTLS(s.config()).ServerHandshake(h)
	h.over = true
	var p *peerInfo
	if err == nil {
		p = &peerInfo{TLSInfo: info.(credentials.TLSInfo)}
		certs := p.State.PeerCertificates
		p.client, p.State.PeerCertificates = newEvidence(certs), nil
		clear(certs) // the connection has the same slice, and would keep them as long as it lives
		if len(p.client.raw) > 0 {
			_, _ = p.client.judge(s.clients.get()) // before RPCs, which are told
		}
	}
	<-s.cores
	if err != nil {
		if bytes.HasPrefix(h.first, []byte(http2.ClientPreface)) {
			info, _ := anypb.New(&errdetails.ErrorInfo{Reason: string(reason.TLSRequired), Domain: reason.Domain}) // it is a valid message
			Refuse(raw, h.first, &spb.Status{Code: unauthenticated, Message: "the server speaks TLS only; connect with the certificate of its authority", Details: []*anypb.Any{info}})
			err = errors.New("identity: the client does not speak TLS")
		}
		return nil, nil, err
	}
	return conn, p, nil
}

// Clone returns s.
func (s serverCredentials) Clone() credentials.TransportCredentials { return s }

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

// unauthenticated is gRPC's code of a caller who is not known.
const unauthenticated = 16

// certificates are those of one side, with the reasons for which the other one refuses them.
type certificates struct {
	name                               string
	unknown, expired, use, host, other reason.Reason
}

var (
	servers = certificates{"the server's certificate", reason.ServerCertUnknown, reason.ServerCertExpired, "", reason.ServerCertHost, ""}
	clients = certificates{"client certificate", reason.CertUnknown, reason.CertExpired, reason.CertUse, "", reason.CertUnknown}
)

// refused says what is wrong with a certificate, which no authority that is known has signed, or
// for which crypto/x509 gives another reason.
func (c *certificates) refused(err error, known string) error {
	var unknown x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	var name x509.HostnameError
	why, text := c.other, strings.TrimPrefix(strings.TrimPrefix(err.Error(), "tls: "), "x509: ")
	switch {
	case errors.As(err, &unknown):
		why, text = c.unknown, "it is not signed by an authority "+known
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired && time.Now().Before(invalid.Cert.NotBefore):
		text = fmt.Sprintf("it is not valid before %s; is a clock wrong?", invalid.Cert.NotBefore.UTC().Format(time.RFC3339))
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		why, text = c.expired, "it expired on "+invalid.Cert.NotAfter.UTC().Format(time.RFC3339)
	case errors.As(err, &invalid) && invalid.Reason == x509.IncompatibleUsage:
		why, text = c.use, "it is not for this use: a server's certificate is not valid for a client, and vice versa"
	case errors.As(err, &name) && len(name.Certificate.DNSNames)+len(name.Certificate.IPAddresses) == 0:
		why, text = reason.ServerCertNoHost, "it names no host (subjectAltName)"
	case errors.As(err, &name):
		names := append([]string{}, name.Certificate.DNSNames...)
		for _, ip := range name.Certificate.IPAddresses {
			names = append(names, ip.String())
		}
		why, text = c.host, fmt.Sprintf("it is for %s, not for %s", strings.Join(names, ", "), name.Host)
	}
	return refused(why, "%s: %s", c.name, text)
}
