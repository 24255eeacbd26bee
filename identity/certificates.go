package identity

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Names of the files that WriteCertificates writes. A client's begin with its name, such as
// alice.pem and alice-key.pem.
const (
	AuthorityFile    = "ca.pem"
	AuthorityKeyFile = "ca-key.pem"
	ServerFile       = "server.pem"
	ServerKeyFile    = "server-key.pem"
)

// ErrName is wrapped when a host or a client cannot have the name that was given.
var ErrName = errors.New("identity: bad name")

// local are names of the server that every server certificate includes.
var local = []string{"localhost", "127.0.0.1", "::1"}

var (
	// hostName matches DNS names, whose first label may be a wildcard.
	hostName = regexp.MustCompile(`^(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*$`)
	// clientName matches names that can begin the name of a file anywhere.
	clientName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$`)
	// reserved are the names whose files are not a client's.
	reserved = []string{"ca", "ca-key", "server", "server-key"}
)

// WriteCertificates writes certificates to a folder: an authority's and a server's, unless
// the folder has them, and a new one for a client. The server's is for the local names; if
// there are hosts, it is a new one, for them too. The authority is valid for ten years, the
// others for one. Keys are ECDSA, on P-256. It returns the names of the files written.
func WriteCertificates(dir string, hosts []string, client string) (written []string, err error) {
	for _, host := range hosts {
		if net.ParseIP(host) == nil && (!hostName.MatchString(host) || len(host) > hostBytes) {
			return nil, fmt.Errorf("%w: host %q; use a DNS name or an IP address, without a port", ErrName, host)
		}
	}
	if !clientName.MatchString(client) || slices.Contains(reserved, client) {
		return nil, fmt.Errorf("%w: client %q; use up to 64 letters, digits and ._@-, but not %s", ErrName, client, strings.Join(reserved, ", "))
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("identity: %w", err)
	}
	issue := func(name string, c, authority *x509.Certificate, by *ecdsa.PrivateKey) error {
		file, keyFile := name+".pem", name+"-key.pem"
		written = append(written, file, keyFile)
		return write(dir, file, keyFile, c, authority, by)
	}
	if missing(dir, AuthorityFile) && missing(dir, AuthorityKeyFile) {
		if err := issue("ca", &x509.Certificate{
			Subject: pkix.Name{CommonName: "tensorferry authority"}, NotAfter: time.Now().AddDate(0, 0, 10*validDays),
			IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		}, nil, nil); err != nil {
			return nil, err
		}
	}
	authority, err := keyPair(filepath.Join(dir, AuthorityFile), filepath.Join(dir, AuthorityKeyFile))
	if err != nil {
		return nil, err
	}
	key, ok := authority.PrivateKey.(*ecdsa.PrivateKey)
	if !ok || !authority.Leaf.IsCA {
		return nil, fmt.Errorf("identity: %s in %s is not an authority with an ECDSA key; choose another folder", AuthorityFile, dir)
	}
	if len(hosts) > 0 || missing(dir, ServerFile) {
		if err := issue("server", serverCertificate(slices.Concat(hosts, local)), authority.Leaf, key); err != nil {
			return nil, err
		}
	}
	if err := issue(client, &x509.Certificate{
		Subject: pkix.Name{CommonName: client}, NotAfter: time.Now().AddDate(0, 0, validDays),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, authority.Leaf, key); err != nil {
		return nil, err
	}
	return written, nil
}

// serverCertificate returns the contents of a server's certificate for some hosts.
func serverCertificate(hosts []string) *x509.Certificate {
	c := &x509.Certificate{
		Subject: pkix.Name{CommonName: hosts[0]}, NotAfter: time.Now().AddDate(0, 0, validDays),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, host := range hosts {
		if ip := net.ParseIP(host); ip != nil {
			c.IPAddresses = append(c.IPAddresses, ip)
		} else {
			c.DNSNames = append(c.DNSNames, host)
		}
	}
	return c
}

// missing reports whether a folder lacks a file.
func missing(dir, file string) bool {
	_, err := os.Lstat(filepath.Join(dir, file))
	return errors.Is(err, fs.ErrNotExist)
}

// write creates a key and a certificate, signed by an authority or self-signed, and
// replaces their files.
func write(dir, file, keyFile string, c, authority *x509.Certificate, by *ecdsa.PrivateKey) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("identity: %w", err)
	}
	if by == nil {
		authority, by = c, key
	}
	c.NotBefore = time.Now().Add(-clockSkew)
	signed, err := x509.CreateCertificate(rand.Reader, c, authority, key.Public(), by)
	if err != nil {
		return fmt.Errorf("identity: %w", err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return fmt.Errorf("identity: %w", err)
	}
	return errors.Join(
		replace(filepath.Join(dir, keyFile), &pem.Block{Type: "PRIVATE KEY", Bytes: private}, 0o600),
		replace(filepath.Join(dir, file), &pem.Block{Type: "CERTIFICATE", Bytes: signed}, 0o644),
	)
}

// replace writes a file atomically: a reader sees the old file or the new one.
func replace(path string, b *pem.Block, mode os.FileMode) error {
	part := path + ".part"
	err := os.WriteFile(part, pem.EncodeToMemory(b), mode)
	if err == nil {
		err = os.Rename(part, path)
	}
	if err != nil {
		return fmt.Errorf("identity: %w", err)
	}
	return nil
}
