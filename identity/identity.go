// Package identity secures connections with TLS 1.3 and identifies the peer. It reads
// certificates, keys and tokens from files, for servers and for clients, and can create a
// small certificate authority for a first try.
//
// Files are read again when they change. While one of them cannot be read, the previous
// contents stay in force. Servers and clients are safe for concurrent use. Package server
// uses a Server's Credentials and Principal; package client uses the results of
// ClientFiles.Credentials.
//
// It does not decide what a principal may do, and it does not carry bytes; crypto/tls does.
package identity

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/tensorferry/tensorferry/reason"
)

// RefusedError says why a peer was refused, in words for that peer.
type RefusedError struct {
	Reason reason.Reason // may be empty
	Text   string
}

// Error returns the text.
func (e *RefusedError) Error() string { return "identity: " + e.Text }

// Why returns the reason.
func (e *RefusedError) Why() reason.Reason { return e.Reason }

func refused(why reason.Reason, format string, args ...any) error {
	return &RefusedError{why, fmt.Sprintf(format, args...)}
}

// watched is a value made from files, again when one has changed and while that fails: meanwhile
// the previous value stays in force, and each error is logged once for each change of the files.
type watched[T any] struct {
	log   *slog.Logger
	paths []string // "" means no file
	make  func(again bool) (T, error)

	mu     sync.Mutex // guards all below
	value  T
	failed string // why the value could not be made again; "" if it could
	looked time.Time
	files  [][sha256.Size]byte // what they had in them, or why they could not be read
}

// watch makes a value for the first time.
func watch[T any](log *slog.Logger, f func(again bool) (T, error), paths ...string) (w *watched[T], err error) {
	w = &watched[T]{log: log, paths: paths, make: f}
	w.differ()
	w.value, err = f(false)
	return w, err
}

// get returns the value.
func (w *watched[T]) get() T {
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Since(w.looked) < lookEvery {
		return w.value
	}
	differ := w.differ()
	if !differ && w.failed == "" {
		return w.value
	}
	value, err := w.make(true)
	if err == nil {
		w.value, w.failed = value, ""
	} else if differ || err.Error() != w.failed {
		w.failed = err.Error()
		w.log.Warn("certificates, keys, tokens or roles have changed and cannot be read; the previous ones stay in force", slog.String("error", w.failed))
	}
	return w.value
}

// differ looks at the files, and reports whether they have changed; mu is held.
func (w *watched[T]) differ() bool {
	w.looked = time.Now()
	files := make([][sha256.Size]byte, len(w.paths))
	for i, path := range w.paths {
		b, err := readFile(path) // make returns the error
		files[i] = sha256.Sum256(fmt.Append(b, err))
	}
	differ := !slices.Equal(files, w.files)
	w.files = files
	return differ
}

// reread looks at the files now.
func (w *watched[T]) reread() {
	w.mu.Lock()
	w.looked = time.Time{}
	w.mu.Unlock()
	w.get()
}

// OthersRead reports whether every user of this machine may read a file.
func OthersRead(path string) bool {
	i, err := os.Stat(path)
	return err == nil && runtime.GOOS != "windows" && i.Mode()&0o004 != 0
}

// Watch returns a function, now, that returns what parse makes of a file, again when it has
// changed, as a Server does with its own files; reread makes it look now, as Reread does. While that
// fails, the previous value stays in force, and log has a line. parse gets the text of the file.
func Watch[T any](path string, log *slog.Logger, parse func(text string) (T, error)) (now func() T, reread func(), err error) {
	w, err := watch(log, func(bool) (value T, err error) {
		b, err := readFile(path)
		if err != nil {
			return value, err
		}
		if value, err = parse(string(b)); err != nil {
			err = fmt.Errorf("identity: %s, %w", path, err)
		}
		return value, err
	}, path)
	return w.get, w.reread, err
}

// readFile reads a regular file of at most fileBytes. It does not wait for the writer of a
// pipe that is in its place.
func readFile(path string) ([]byte, error) {
	b, err := readRegular(path)
	if bad := new(fs.PathError); errors.As(err, &bad) {
		err = bad.Err // without the path, with which this error begins
	}
	if err != nil {
		return nil, fmt.Errorf("identity: %s: %w", path, err)
	}
	return b, nil
}

func readRegular(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	i, err := f.Stat()
	switch {
	case err != nil:
		return nil, err
	case i.IsDir():
		return nil, errors.New("is a directory")
	case !i.Mode().IsRegular():
		return nil, errors.New("is not a regular file")
	}
	b, err := io.ReadAll(io.LimitReader(f, fileBytes+1)) // it may be growing
	if len(b) > fileBytes {
		return nil, fmt.Errorf("too large, the limit is %d bytes", fileBytes)
	}
	return b, err
}

// keyPair reads a certificate and its key.
func keyPair(cert, key string) (tls.Certificate, error) {
	if cert == "" || key == "" {
		return tls.Certificate{}, errors.New("identity: a certificate needs its private key and vice versa; give both files")
	}
	c, err := readFile(cert)
	if err != nil {
		return tls.Certificate{}, err
	}
	k, err := readFile(key)
	if err != nil {
		return tls.Certificate{}, err
	}
	pair, err := tls.X509KeyPair(c, k)
	if err != nil {
		return pair, fmt.Errorf("identity: %s and %s are not a certificate and its key in PEM: %s", cert, key, strings.TrimPrefix(err.Error(), "tls: "))
	}
	return pair, nil
}

// authorities reads the certificates of authorities.
func authorities(path string) (*x509.CertPool, error) {
	b, err := readFile(path)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(b) {
		return nil, fmt.Errorf("identity: %s has no certificate in PEM", path)
	}
	return pool, nil
}

// token is a line of a file of tokens.
type token struct{ name, text string }

// readTokens reads a file with a token in each line, which the name of its owner may
// precede. Lines that begin with # are comments.
func readTokens(path string) ([]token, error) {
	b, err := readFile(path)
	if err != nil {
		return nil, err
	}
	var all []token
	for n, line := range strings.Split(string(b), "\n") {
		words := strings.Fields(line)
		if len(words) == 0 || strings.HasPrefix(words[0], "#") {
			continue
		}
		t := token{name: "token", text: words[len(words)-1]}
		if len(words) == 2 {
			t.name = words[0]
		}
		switch {
		case len(words) > 2:
			return nil, fmt.Errorf("identity: %s, line %d: more than a name and a token", path, n+1)
		case len(t.text) < leastToken || len(t.text) > mostToken:
			return nil, fmt.Errorf("identity: %s, line %d: a token has %d to %d characters; openssl rand -hex 32 makes a good one", path, n+1, leastToken, mostToken)
		case strings.ContainsFunc(t.text, func(r rune) bool { return r < '!' || r > '~' }):
			return nil, fmt.Errorf("identity: %s, line %d: a token must consist of printable ASCII characters", path, n+1)
		}
		all = append(all, t)
	}
	return all, nil
}

// noToken says that a file has no token.
func noToken(path string) error { return fmt.Errorf("identity: %s has no token", path) }

// digest returns the key under which a token is looked up. Comparing hashes leaks no timing
// information about the token.
func digest(token string) [sha256.Size]byte { return sha256.Sum256([]byte(token)) }
