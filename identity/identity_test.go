package identity_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/credentials"

	"github.com/tensorferry/tensorferry/identity"
)

const (
	bob   = "0123456789abcdef0123456789abcdef"
	carol = "another-token-of-some-length"
)

// files writes certificates, and tokens, into a new folder.
func files(t testing.TB, hosts ...string) string {
	t.Helper()
	dir := t.TempDir()
	_, err := identity.WriteCertificates(dir, hosts, "alice")
	require.NoError(t, err)
	write(t, filepath.Join(dir, "tokens"), "# two\nbob "+bob+"\n\n"+carol+"\n")
	write(t, filepath.Join(dir, "token"), bob)
	return dir
}

// write replaces a file, and makes sure that its stamp differs.
func write(t testing.TB, path, text string) {
	t.Helper()
	require.NoError(t, os.WriteFile(path+".new", []byte(text), 0o600))
	require.NoError(t, os.Rename(path+".new", path))
}

func serverFiles(dir string) identity.ServerFiles {
	at := func(name string) string { return filepath.Join(dir, name) }
	return identity.ServerFiles{Cert: at(identity.ServerFile), Key: at(identity.ServerKeyFile), ClientCA: at(identity.AuthorityFile), Tokens: at("tokens")}
}

func clientFiles(dir string) identity.ClientFiles {
	at := func(name string) string { return filepath.Join(dir, name) }
	return identity.ClientFiles{CA: at(identity.AuthorityFile), Cert: at("alice.pem"), Key: at("alice-key.pem")}
}

// shake connects a client to a server, and returns what each side has of the other.
func shake(t testing.TB, s *identity.Server, files identity.ClientFiles, authority string) (info credentials.AuthInfo, client, server error) {
	t.Helper()
	creds, _, err := files.Credentials()
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		conn, err := l.Accept()
		if err != nil {
			server = err
			return
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
		var secure net.Conn
		if secure, info, server = s.Credentials().ServerHandshake(conn); server == nil {
			_, server = secure.Write([]byte("hello"))
		}
	}()
	conn, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
	secure, _, client := creds.ClientHandshake(t.Context(), authority, conn)
	if client == nil {
		_, client = secure.Read(make([]byte, 5))
	}
	<-done
	return info, client, server
}

func TestWhoIsKnownIsNamedAndWhoIsNotIsToldWhy(t *testing.T) {
	dir, other := files(t), files(t)
	s, err := identity.NewServer(serverFiles(dir), slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	without := clientFiles(dir)
	without.Cert, without.Key = "", ""
	stranger := clientFiles(dir)
	stranger.Cert, stranger.Key = clientFiles(other).Cert, clientFiles(other).Key
	wrongUse := clientFiles(dir)
	wrongUse.Cert, wrongUse.Key = serverFiles(dir).Cert, serverFiles(dir).Key
	expired := clientFiles(dir)
	expired.Cert, expired.Key = signed(t, dir, "late", time.Now().Add(-time.Minute))
	for name, c := range map[string]struct {
		files  identity.ClientFiles
		tokens []string
		want   string
		err    string
	}{
		"certificate":                         {files: clientFiles(dir), want: "alice"},
		"token":                               {files: without, tokens: []string{"Bearer " + bob}, want: "bob"},
		"token without name":                  {files: without, tokens: []string{"bearer " + carol}, want: "token"},
		"both":                                {files: clientFiles(dir), tokens: []string{"Bearer " + bob}, want: "bob"},
		"neither":                             {files: without, err: "the server wants a client certificate, or a token"},
		"wrong token":                         {files: without, tokens: []string{"Bearer " + bob[1:]}, err: "does not know the token"},
		"wrong token and a right certificate": {files: clientFiles(dir), tokens: []string{"Bearer x"}, err: "does not know the token"},
		"another scheme":                      {files: without, tokens: []string{"Basic " + bob}, err: "does not know the token"},
		"another authority":                   {files: stranger, err: "client certificate: it is not signed by an authority that the server knows"},
		"a server's certificate":              {files: wrongUse, err: "client certificate: it is not for this use"},
		"expired":                             {files: expired, err: "client certificate: it expired on"},
	} {
		t.Run(name, func(t *testing.T) {
			info, client, server := shake(t, s, c.files, "localhost:1")
			require.NoError(t, client)
			require.NoError(t, server)
			for range 2 { // the second time it is remembered
				got, err := s.Principal(info, c.tokens)
				if c.err != "" {
					var refused *identity.RefusedError
					require.ErrorAs(t, err, &refused)
					require.Contains(t, refused.Text, c.err)
					continue
				}
				require.NoError(t, err)
				require.Equal(t, c.want, got)
			}
		})
	}
	_, err = s.Principal(nil, []string{"Bearer " + bob})
	require.ErrorContains(t, err, "not encrypted")
}

// signed makes a client certificate of the authority in a folder that ends at a time.
func signed(t testing.TB, dir, name string, until time.Time) (cert, keyFile string) {
	t.Helper()
	read := func(file string) []byte {
		b, err := os.ReadFile(filepath.Join(dir, file))
		require.NoError(t, err)
		block, _ := pem.Decode(b)
		return block.Bytes
	}
	ca, err := x509.ParseCertificate(read(identity.AuthorityFile))
	require.NoError(t, err)
	by, err := x509.ParsePKCS8PrivateKey(read(identity.AuthorityKeyFile))
	require.NoError(t, err)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	b, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(7), Subject: pkix.Name{CommonName: name}, NotBefore: until.Add(-time.Hour), NotAfter: until,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}, DNSNames: []string{"localhost"},
	}, ca, key.Public(), by)
	require.NoError(t, err)
	private, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	cert, keyFile = filepath.Join(dir, name+".pem"), filepath.Join(dir, name+"-key.pem")
	write(t, cert, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: b})))
	write(t, keyFile, string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})))
	return cert, keyFile
}

func TestAClientTellsWhatIsWrongWithTheServer(t *testing.T) {
	dir, other := files(t, "ferry.example"), files(t)
	s, err := identity.NewServer(serverFiles(dir), slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	late := serverFiles(dir)
	late.Cert, late.Key = signed(t, dir, "late", time.Now().Add(time.Hour))
	var log strings.Builder
	expired, err := identity.NewServer(late, slog.New(slog.NewTextHandler(&log, nil)))
	require.NoError(t, err)
	signed(t, dir, "late", time.Now().Add(-time.Minute))
	require.Eventually(t, func() bool {
		_, client, _ := shake(t, expired, clientFiles(dir), "localhost")
		return client != nil
	}, 10*time.Second, 10*time.Millisecond)
	require.Contains(t, log.String(), "late.pem expired on")
	elsewhere := clientFiles(dir)
	elsewhere.CA = clientFiles(other).CA
	system := clientFiles(dir)
	system.CA = ""
	named := clientFiles(dir)
	named.ServerName = "ferry.example"
	for name, c := range map[string]struct {
		server    *identity.Server
		files     identity.ClientFiles
		authority string
		err       string
	}{
		"known":              {s, clientFiles(dir), "localhost:50051", ""},
		"address":            {s, clientFiles(dir), "127.0.0.1:50051", ""},
		"name":               {s, clientFiles(dir), "ferry.example:50051", ""},
		"name of the config": {s, named, "192.0.2.1:50051", ""},
		"another name":       {s, clientFiles(dir), "other.example:50051", "it is for ferry.example, localhost, 127.0.0.1, ::1, not for other.example"},
		"another authority":  {s, elsewhere, "localhost:50051", "it is not signed by an authority in " + elsewhere.CA},
		"the system's":       {s, system, "localhost:50051", "it is not signed by an authority that this system trusts"},
		"expired":            {expired, clientFiles(dir), "localhost:50051", "it expired on"},
	} {
		t.Run(name, func(t *testing.T) {
			_, client, _ := shake(t, c.server, c.files, c.authority)
			if c.err == "" {
				require.NoError(t, client)
				return
			}
			require.ErrorContains(t, client, "the server's certificate: ")
			require.ErrorContains(t, client, c.err)
		})
	}
}

func TestAServerSaysThatItsCertificateExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := files(t)
		f := serverFiles(dir)
		f.Cert, f.Key = signed(t, dir, "brief", time.Now().Add(time.Hour))
		var log strings.Builder
		s, err := identity.NewServer(f, slog.New(slog.NewTextHandler(&log, nil)))
		require.NoError(t, err)
		for _, c := range []struct {
			later time.Duration
			want  string
		}{
			{45 * time.Minute, ""},
			{10 * time.Minute, "the server's certificate expires soon"},
			{time.Hour, "the server's certificate has expired: clients refuse it"},
		} {
			time.Sleep(c.later)
			log.Reset()
			for range 3 {
				_, _, _ = shake(t, s, clientFiles(dir), "localhost")
			}
			if c.want == "" {
				require.Empty(t, log.String())
				continue
			}
			require.Equal(t, 1, strings.Count(log.String(), c.want), log.String())
		}
	})
}

func TestFilesAreReadAgainWhenTheyChange(t *testing.T) {
	dir := files(t)
	var log strings.Builder
	s, err := identity.NewServer(serverFiles(dir), slog.New(slog.NewTextHandler(&log, nil)))
	require.NoError(t, err)
	info, client, server := shake(t, s, clientFiles(dir), "localhost")
	require.NoError(t, client)
	require.NoError(t, server)
	name := func(token string) string {
		name, _ := s.Principal(info, []string{"Bearer " + token})
		return name
	}
	require.Equal(t, "bob", name(bob))
	const dave = "a-token-that-is-new-here"
	write(t, filepath.Join(dir, "tokens"), "dave "+dave)
	require.Eventually(t, func() bool { return name(dave) == "dave" }, 10*time.Second, 10*time.Millisecond)
	require.Empty(t, name(bob))
	write(t, filepath.Join(dir, "tokens"), "short")
	require.Eventually(t, func() bool { return name(dave) == "dave" && strings.Contains(log.String(), "16 to 4096 characters") }, 10*time.Second, 10*time.Millisecond)
	require.Equal(t, 1, strings.Count(log.String(), "stay in force"))
	write(t, filepath.Join(dir, "tokens"), "bob "+bob)
	require.Eventually(t, func() bool { return name(bob) == "bob" }, 10*time.Second, 10*time.Millisecond)

	// A client that keeps its own authority meets the server's new certificate of it.
	_, err = identity.WriteCertificates(dir, []string{"new.example"}, "alice")
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		_, client, _ := shake(t, s, clientFiles(dir), "new.example")
		return client == nil
	}, 10*time.Second, 10*time.Millisecond)
	// And an authority that is replaced refuses who was known.
	other := files(t)
	b, err := os.ReadFile(clientFiles(other).CA)
	require.NoError(t, err)
	write(t, clientFiles(dir).CA, string(b))
	require.Eventually(t, func() bool { _, err := s.Principal(info, nil); return err != nil }, 10*time.Second, 10*time.Millisecond)
	write(t, filepath.Join(dir, "tokens"), "# nobody")
	require.Eventually(t, func() bool { return name(bob) == "" }, 10*time.Second, 10*time.Millisecond)
	for _, line := range []string{"tokens were read again", "tokens=1", "the server's certificate was read again", "the authorities of clients were read again", "no token is left"} {
		require.Contains(t, log.String(), line)
	}
}

func TestAFileThatCannotBeReadHoldsUpNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := files(t)
		f := serverFiles(dir)
		f.ClientCA = clientFiles(files(t)).CA
		var log strings.Builder
		s, err := identity.NewServer(f, slog.New(slog.NewTextHandler(&log, nil)))
		require.NoError(t, err)
		key, err := os.ReadFile(clientFiles(dir).Key)
		require.NoError(t, err)
		write(t, f.Key, string(key))
		write(t, f.ClientCA, "none")
		write(t, f.Tokens, "dave "+carol)
		time.Sleep(2 * time.Second)
		info, client, server := shake(t, s, clientFiles(dir), "localhost")
		require.NoError(t, client)
		require.NoError(t, server)
		require.Contains(t, log.String(), "are not a certificate and its key")
		_, err = s.Principal(info, []string{"Bearer " + bob})
		require.ErrorContains(t, err, "does not know the token")
		name, err := s.Principal(info, []string{"Bearer " + carol})
		require.NoError(t, err)
		require.Equal(t, "dave", name)
	})
}

func TestTheLastTokenCanBeTaken(t *testing.T) {
	for _, none := range []string{"", "# none\n"} {
		synctest.Test(t, func(t *testing.T) {
			dir := files(t)
			s, err := identity.NewServer(serverFiles(dir), slog.New(slog.DiscardHandler))
			require.NoError(t, err)
			info, client, server := shake(t, s, clientFiles(dir), "localhost")
			require.NoError(t, client)
			require.NoError(t, server)
			_, err = s.Principal(info, []string{"Bearer " + bob})
			require.NoError(t, err)
			write(t, serverFiles(dir).Tokens, none)
			time.Sleep(2 * time.Second)
			_, err = s.Principal(info, []string{"Bearer " + bob})
			require.ErrorContains(t, err, "does not know the token")
		})
	}
}

func TestBadFilesAreRefusedNamingThem(t *testing.T) {
	dir := files(t)
	at := func(name, text string) string {
		path := filepath.Join(dir, name)
		write(t, path, text)
		return path
	}
	good := serverFiles(dir)
	with := func(change func(*identity.ServerFiles)) identity.ServerFiles {
		f := good
		change(&f)
		return f
	}
	for name, c := range map[string]struct {
		files identity.ServerFiles
		err   string
	}{
		"no key":        {with(func(f *identity.ServerFiles) { f.Key = "" }), "give both files"},
		"no such file":  {with(func(f *identity.ServerFiles) { f.Cert = "nothere.pem" }), "nothere.pem: no such file"},
		"a folder":      {with(func(f *identity.ServerFiles) { f.Cert = dir }), "is a directory"},
		"another's key": {with(func(f *identity.ServerFiles) { f.Key = clientFiles(dir).Key }), "are not a certificate and its key"},
		"expired":       {with(func(f *identity.ServerFiles) { f.Cert, f.Key = signed(t, dir, "late", time.Now().Add(-time.Minute)) }), "late.pem expired on"},
		"no PEM":        {with(func(f *identity.ServerFiles) { f.ClientCA = at("x", "x") }), "has no certificate in PEM"},
		"large":         {with(func(f *identity.ServerFiles) { f.ClientCA = at("l", strings.Repeat("x", 1<<20+1)) }), "the limit is 1048576"},
		"no tokens":     {with(func(f *identity.ServerFiles) { f.Tokens = at("e", "# none\n") }), "has no token"},
		"short token":   {with(func(f *identity.ServerFiles) { f.Tokens = at("s", "\nbob 123456789012345") }), "line 2: a token has 16 to 4096 characters"},
		"long token":    {with(func(f *identity.ServerFiles) { f.Tokens = at("t", strings.Repeat("x", 4097)) }), "line 1: a token has"},
		"three words":   {with(func(f *identity.ServerFiles) { f.Tokens = at("w", "a b "+bob) }), "more than a name and a token"},
		"letters":       {with(func(f *identity.ServerFiles) { f.Tokens = at("u", "bob ä"+bob) }), "printable ASCII"},
	} {
		_, err := identity.NewServer(c.files, slog.New(slog.DiscardHandler))
		require.ErrorContains(t, err, c.err, name)
	}
	for name, c := range map[string]struct {
		files identity.ClientFiles
		err   string
	}{
		"key alone": {identity.ClientFiles{Key: clientFiles(dir).Key}, "give both files"},
		"authority": {identity.ClientFiles{CA: "nothere.pem"}, "nothere.pem: no such file"},
		"token":     {identity.ClientFiles{Token: "nothere"}, "nothere: no such file"},
	} {
		_, _, err := c.files.Credentials()
		require.ErrorContains(t, err, c.err, name)
	}
}

func TestAnAuthorityStaysAndHalfOfOneIsNotReplaced(t *testing.T) {
	dir := files(t)
	before, err := os.ReadFile(clientFiles(dir).CA)
	require.NoError(t, err)
	written, err := identity.WriteCertificates(dir, nil, "zoe")
	require.NoError(t, err)
	require.NotContains(t, written, identity.AuthorityFile)
	after, err := os.ReadFile(clientFiles(dir).CA)
	require.NoError(t, err)
	require.Equal(t, before, after)
	for _, key := range []string{identity.AuthorityKeyFile, identity.ServerKeyFile, "alice-key.pem", "zoe-key.pem"} {
		i, err := os.Stat(filepath.Join(dir, key))
		require.NoError(t, err)
		require.Zero(t, i.Mode()&0o077, "others can read "+key)
	}
	require.Equal(t, []string{"zoe.pem", "zoe-key.pem"}, written, "the server's has other hosts, perhaps")
	for _, half := range []string{identity.AuthorityKeyFile, identity.AuthorityFile} {
		dir := files(t)
		require.NoError(t, os.Remove(filepath.Join(dir, half)))
		_, err = identity.WriteCertificates(dir, nil, "zoe")
		require.ErrorIs(t, err, os.ErrNotExist)
		require.NoFileExists(t, filepath.Join(dir, half))
	}
	for _, host := range []string{"", "a,b", "x:50051", "https://x", "bad host", "-a", "a.", strings.Repeat("a", 254)} {
		_, err = identity.WriteCertificates(dir, []string{host}, "zoe")
		require.ErrorIs(t, err, identity.ErrName, host)
	}
	for _, client := range []string{"", "ca", "server", "../zoe", "a/b", ".a", strings.Repeat("a", 65)} {
		_, err = identity.WriteCertificates(dir, nil, client)
		require.ErrorIs(t, err, identity.ErrName, client)
	}
	_, err = identity.WriteCertificates(dir, []string{"*.ferry.example", "fe80::1", "10.0.0.1", "ferry_1"}, "zoe@ferry.example")
	require.NoError(t, err)
}

func TestATokenIsSentWithTLSOnly(t *testing.T) {
	dir := files(t)
	f := clientFiles(dir)
	f.Token = filepath.Join(dir, "token")
	_, perRPC, err := f.Credentials()
	require.NoError(t, err)
	require.True(t, perRPC.RequireTransportSecurity())
	md, err := perRPC.GetRequestMetadata(context.Background())
	require.NoError(t, err)
	require.Equal(t, map[string]string{"authorization": "Bearer " + bob}, md)
}

// TestPeersThatSayNothingTakeNoCore has more handshakes wait than there are cores for them.
func TestPeersThatSayNothingTakeNoCore(t *testing.T) {
	dir := files(t)
	s, err := identity.NewServer(serverFiles(dir), slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	ended := make(chan error)
	var silent []net.Conn
	for range 64 {
		here, there := net.Pipe()
		silent = append(silent, here)
		go func() {
			_, _, err := s.Credentials().ServerHandshake(there)
			ended <- err
		}()
	}
	info, client, server := shake(t, s, clientFiles(dir), "localhost")
	require.NoError(t, client)
	require.NoError(t, server)
	require.NotNil(t, info)
	for _, c := range silent {
		require.NoError(t, c.Close())
		err := <-ended
		require.Error(t, err)
		require.NotContains(t, err.Error(), "speak TLS", "it said nothing")
	}
}

func TestAListenerOfHTTPKnowsItsPeersToo(t *testing.T) {
	dir := files(t)
	s, err := identity.NewServer(serverFiles(dir), slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	served := httptest.NewUnstartedServer(s.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "metrics") })))
	served.TLS = s.Config()
	served.StartTLS()
	defer served.Close()
	ca, err := os.ReadFile(clientFiles(dir).CA)
	require.NoError(t, err)
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(ca))
	get := func(token string, certs ...tls.Certificate) (code int, text string) {
		transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: certs}}
		defer transport.CloseIdleConnections()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, served.URL, http.NoBody)
		require.NoError(t, err)
		if token != "" {
			req.Header.Set("Authorization", "Bearer "+token)
		}
		resp, err := transport.RoundTrip(req)
		require.NoError(t, err)
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return resp.StatusCode, string(body)
	}
	alice, err := tls.LoadX509KeyPair(clientFiles(dir).Cert, clientFiles(dir).Key)
	require.NoError(t, err)
	for _, c := range []struct {
		token string
		certs []tls.Certificate
		code  int
		text  string
	}{
		{bob, nil, http.StatusOK, "metrics"},
		{"", []tls.Certificate{alice}, http.StatusOK, "metrics"},
		{"", nil, http.StatusUnauthorized, "the server wants a client certificate, or a token"},
		{carol[1:], nil, http.StatusUnauthorized, "the server does not know the token"},
	} {
		code, text := get(c.token, c.certs...)
		require.Equal(t, c.code, code)
		require.True(t, strings.HasPrefix(text, c.text), text)
	}
}

// behind writes a file with the first certificate of another and, behind it, n that name
// themselves like the authority of files and have a comment of some length.
func behind(t testing.TB, file string, n, comment int) string {
	t.Helper()
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	for i := range n {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		require.NoError(t, err)
		c := &x509.Certificate{
			SerialNumber: big.NewInt(int64(i + 1)), Subject: pkix.Name{CommonName: "tensorferry authority"}, NotAfter: time.Now().Add(time.Hour),
			IsCA: true, BasicConstraintsValid: true, DNSNames: []string{strings.Repeat("x", comment)},
		}
		der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
		require.NoError(t, err)
		b = append(b, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})...)
	}
	chain := filepath.Join(t.TempDir(), "chain.pem")
	write(t, chain, string(b))
	return chain
}

func TestAClientWithMoreCertificatesThanItNeedsIsRefused(t *testing.T) {
	dir := files(t)
	s, err := identity.NewServer(serverFiles(dir), slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	for name, c := range map[string]struct {
		n, comment int
		err        string
	}{
		"five":        {4, 0, ""},
		"six":         {5, 0, "6 certificates"},
		"15 KiB":      {4, 3500, ""},
		"17 KiB":      {1, 17 << 10, "the limits are 5 and 16384"},
		"250 KiB":     {1, 250 << 10, "more than 65536 bytes during its handshake"},
		"250 of them": {250, 0, "more than 65536 bytes during its handshake"},
	} {
		t.Run(name, func(t *testing.T) {
			f := clientFiles(dir)
			f.Cert = behind(t, f.Cert, c.n, c.comment)
			info, _, err := shake(t, s, f, "localhost")
			if c.err != "" {
				require.ErrorContains(t, err, c.err)
				return
			}
			require.NoError(t, err)
			got, err := s.Principal(info, nil)
			require.NoError(t, err)
			require.Equal(t, "alice", got)
		})
	}
}

// TestAConnectionKeepsNoParsedCertificate looks where crypto/tls keeps them.
func TestAConnectionKeepsNoParsedCertificate(t *testing.T) {
	dir := files(t)
	s, err := identity.NewServer(serverFiles(dir), slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	creds, _, err := clientFiles(dir).Credentials()
	require.NoError(t, err)
	here, there := net.Pipe()
	defer here.Close()
	defer there.Close()
	shaken := make(chan error, 1)
	go func() {
		_, _, err := creds.ClientHandshake(t.Context(), "localhost", here)
		shaken <- err
	}()
	conn, info, err := s.Credentials().ServerHandshake(there)
	require.NoError(t, err)
	require.NoError(t, <-shaken)
	for _, c := range conn.(*tls.Conn).ConnectionState().PeerCertificates {
		require.True(t, c == nil)
	}
	got, err := s.Principal(info, nil)
	require.NoError(t, err)
	require.Equal(t, "alice", got)
}

// TestOneVerdictIsForAllRPCsOfAConnection tells verdicts by their errors.
func TestOneVerdictIsForAllRPCsOfAConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := files(t)
		s, err := identity.NewServer(serverFiles(dir), slog.New(slog.DiscardHandler))
		require.NoError(t, err)
		f := clientFiles(dir)
		f.Cert = behind(t, f.Cert, 4, 0)
		info, client, server := shake(t, s, f, "localhost")
		require.NoError(t, client)
		require.NoError(t, server)
		_, err = s.Principal(info, nil)
		require.NoError(t, err)
		b, err := os.ReadFile(clientFiles(files(t)).CA)
		require.NoError(t, err)
		write(t, serverFiles(dir).ClientCA, string(b))
		time.Sleep(2 * time.Second)
		_, first := s.Principal(info, nil)
		require.ErrorContains(t, first, "not signed by an authority that the server knows")
		errs := make(chan error)
		for range 256 {
			go func() {
				_, err := s.Principal(info, nil)
				errs <- err
			}()
		}
		for range 256 {
			require.Same(t, first, <-errs)
		}
	})
}

func TestACertificateThatIsNotYetValidBecomesSo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := files(t)
		s, err := identity.NewServer(serverFiles(dir), slog.New(slog.DiscardHandler))
		require.NoError(t, err)
		f := clientFiles(dir)
		f.Cert, f.Key = signed(t, dir, "early", time.Now().Add(time.Hour+2*time.Second))
		info, client, server := shake(t, s, f, "localhost")
		require.NoError(t, client)
		require.NoError(t, server)
		_, err = s.Principal(info, nil)
		require.ErrorContains(t, err, "it is not valid before")
		time.Sleep(6 * time.Second)
		got, err := s.Principal(info, nil)
		require.NoError(t, err)
		require.Equal(t, "early", got)
		time.Sleep(time.Hour)
		_, err = s.Principal(info, nil)
		require.ErrorContains(t, err, "it expired on")
	})
}

// TestAnHTTPConnectionIsJudgedOnce tells by what is allocated whether a certificate is checked.
func TestAnHTTPConnectionIsJudgedOnce(t *testing.T) {
	dir, other := files(t), files(t)
	s, err := identity.NewServer(serverFiles(dir), slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	pair, err := tls.LoadX509KeyPair(behind(t, clientFiles(other).Cert, 4, 0), clientFiles(other).Key)
	require.NoError(t, err)
	var certs []*x509.Certificate
	for _, der := range pair.Certificate {
		c, err := x509.ParseCertificate(der)
		require.NoError(t, err)
		certs = append(certs, c)
	}
	h := s.Handler(http.NotFoundHandler())
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", http.NoBody)
	ask := func() {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		require.Equal(t, http.StatusUnauthorized, w.Code)
	}
	each := testing.AllocsPerRun(100, func() {
		r.TLS = &tls.ConnectionState{PeerCertificates: certs}
		ask()
	})
	same := testing.AllocsPerRun(100, ask)
	require.Less(t, same, each/4)
}

func TestASecretThatOthersCanReadIsWarnedOf(t *testing.T) {
	dir := t.TempDir()
	_, err := identity.WriteCertificates(dir, nil, "alice")
	require.NoError(t, err)
	tokens := filepath.Join(dir, "tokens")
	require.NoError(t, os.WriteFile(tokens, []byte("alice "+strings.Repeat("x", 32)), 0o600))
	warned := func() int {
		var said bytes.Buffer
		_, err := identity.NewServer(identity.ServerFiles{Cert: filepath.Join(dir, identity.ServerFile), Key: filepath.Join(dir, identity.ServerKeyFile), Tokens: tokens}, slog.New(slog.NewTextHandler(&said, nil)))
		require.NoError(t, err)
		return strings.Count(said.String(), "other users can read a secret")
	}
	require.Zero(t, warned())
	require.NoError(t, os.Chmod(tokens, 0o604))
	require.Equal(t, 1, warned())
	require.NoError(t, os.Chmod(filepath.Join(dir, identity.ServerKeyFile), 0o644))
	require.Equal(t, 2, warned())
}
