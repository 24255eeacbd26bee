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
	"slices"
	"time"
)

// Names of the files that WriteCertificates writes.
const (
	AuthorityFile    = "ca.pem"
	AuthorityKeyFile = "ca-key.pem"
	ServerFile       = "server.pem"
	ServerKeyFile    = "server-key.pem"
	ClientFile       = "client.pem"
	ClientKeyFile    = "client-key.pem"
)

// local are names of the server that every server certificate includes.
var local = []string{"localhost", "127.0.0.1", "::1"}

// WriteCertificates writes an authority to a folder, unless the folder has one, and two new
// certificates: a server's, for some hosts and the local names, and a client's, for a name.
// Both are valid for a year. Keys are ECDSA, on P-256. It returns the names of the files
// written.
func WriteCertificates(dir string, hosts []string, client string) (written []string, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("identity: %w", err)
	}
	authority, key, err := openAuthority(dir)
	_, half := os.Stat(filepath.Join(dir, AuthorityFile))
	if errors.Is(err, fs.ErrNotExist) && errors.Is(half, fs.ErrNotExist) {
		subject := &x509.Certificate{
			Subject: pkix.Name{CommonName: "tensorferry authority"}, NotAfter: time.Now().AddDate(0, 0, authorityDays),
			IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		}
		if err = write(dir, AuthorityFile, AuthorityKeyFile, subject, nil, nil); err == nil {
			written = append(written, AuthorityFile, AuthorityKeyFile)
			authority, key, err = openAuthority(dir)
		}
	}
	if err != nil {
		return nil, err
	}
	server := &x509.Certificate{
		Subject: pkix.Name{CommonName: append(slices.Clone(hosts), local...)[0]}, NotAfter: time.Now().AddDate(0, 0, validDays),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, host := range append(slices.Clone(hosts), local...) {
		if ip := net.ParseIP(host); ip != nil {
			server.IPAddresses = append(server.IPAddresses, ip)
		} else {
			server.DNSNames = append(server.DNSNames, host)
		}
	}
	user := &x509.Certificate{
		Subject: pkix.Name{CommonName: client}, NotAfter: time.Now().AddDate(0, 0, validDays),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	if err := errors.Join(
		write(dir, ServerFile, ServerKeyFile, server, authority, key),
		write(dir, ClientFile, ClientKeyFile, user, authority, key),
	); err != nil {
		return nil, err
	}
	return append(written, ServerFile, ServerKeyFile, ClientFile, ClientKeyFile), nil
}

// openAuthority reads the authority of a folder.
func openAuthority(dir string) (*x509.Certificate, *ecdsa.PrivateKey, error) {
	pair, err := keyPair(filepath.Join(dir, AuthorityFile), filepath.Join(dir, AuthorityKeyFile))
	if err != nil {
		return nil, nil, err
	}
	key, ok := pair.PrivateKey.(*ecdsa.PrivateKey)
	if !ok || !pair.Leaf.IsCA {
		return nil, nil, fmt.Errorf("identity: %s in %s is not an authority with an ECDSA key; choose another folder", AuthorityFile, dir)
	}
	return pair.Leaf, key, nil
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
