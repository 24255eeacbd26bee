package identity

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"

	"google.golang.org/grpc/credentials"

	"github.com/tensorferry/tensorferry/reason"
)

// ClientFiles names the files that secure a client, all in PEM except Token. The tags are for
// package relay.
type ClientFiles struct {
	// CA has the authorities that may sign the server's certificate; "" means those that
	// the system trusts.
	CA string `json:"ca"`
	// Cert and Key are the client's certificate and its private key; "" means none.
	Cert string `json:"cert"`
	Key  string `json:"key"`
	// ServerName is the name in the server's certificate; "" means the host of its address.
	ServerName string `json:"server_name"`
	// Token has the client's token, in the format of ServerFiles.Tokens; only the first
	// token is used. "" means none.
	Token string `json:"token"`
}

// clientSecrets are the contents of ClientFiles.
type clientSecrets struct {
	roots *x509.CertPool // nil: the system's
	cert  *tls.Certificate
}

// Credentials reads the files and returns the credentials for a client's Config: those of
// the connection, and those of each RPC, which are nil without a Token.
func (f ClientFiles) Credentials() (credentials.TransportCredentials, credentials.PerRPCCredentials, error) {
	c := &clientCredentials{TransportCredentials: credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13}), files: f}
	c.now = watch(func() (all clientSecrets, err error) {
		if f.CA != "" {
			if all.roots, err = authorities(f.CA); err != nil {
				return all, err
			}
		}
		if f.Cert != "" || f.Key != "" {
			cert, err := keyPair(f.Cert, f.Key)
			if err != nil {
				return all, err
			}
			all.cert = &cert
		}
		return all, nil
	}, f.CA, f.Cert, f.Key)
	if _, err := c.now.get(); err != nil || f.Token == "" {
		return c, nil, err
	}
	t := &clientToken{watch(func() (string, error) {
		all, err := readTokens(f.Token)
		if err != nil {
			return "", err
		}
		if len(all) == 0 {
			return "", noToken(f.Token)
		}
		return "Bearer " + all[0].text, nil
	}, f.Token)}
	_, err := t.now.get()
	return c, t, err
}

type clientCredentials struct {
	credentials.TransportCredentials // describes the protocol
	files                            ClientFiles
	now                              *watched[clientSecrets]
}

// ClientHandshake secures a connection. Its errors say which side must be fixed.
func (c *clientCredentials) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	all, _ := c.now.get() // on errors the previous value stays in force
	cfg := &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: all.roots}
	if all.cert != nil {
		cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return all.cert, nil }
	}
	conn, info, err := credentials.NewTLS(cfg).ClientHandshake(ctx, cmp.Or(c.files.ServerName, authority), raw)
	var record tls.RecordHeaderError
	var bad *tls.CertificateVerificationError
	var op *net.OpError
	switch {
	case err == nil:
		return conn, info, nil
	case errors.As(err, &bad):
		known := "that this system trusts"
		if c.files.CA != "" {
			known = "in " + c.files.CA
		}
		err = servers.refused(bad.Err, known)
	case errors.As(err, &op) && op.Op == "remote error": // an alert, of crypto/tls
		err = refused("", "the server ended the handshake: %s", op.Err)
	case errors.As(err, &record):
		err = refused(reason.ServerWithoutTLS, "the server does not speak TLS")
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET):
		err = fmt.Errorf("the server closed the connection before it was encrypted: it is stopping, or has too many connections: %w", err)
	}
	return nil, nil, err
}

// Clone returns c.
func (c *clientCredentials) Clone() credentials.TransportCredentials { return c }

// clientToken is sent with every RPC.
type clientToken struct{ now *watched[string] }

// GetRequestMetadata returns the token.
func (t *clientToken) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	text, _ := t.now.get() // on errors the previous value stays in force
	return map[string]string{"authorization": text}, nil
}

// RequireTransportSecurity returns true: the token must not be sent unencrypted.
func (*clientToken) RequireTransportSecurity() bool { return true }
