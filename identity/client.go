package identity

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
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

// Credentials reads the files and returns the credentials for a client's Config: those of
// the connection, and those of each RPC, which are nil without a Token.
func (f ClientFiles) Credentials() (credentials.TransportCredentials, credentials.PerRPCCredentials, error) {
	silent := slog.New(slog.DiscardHandler)
	now, err := watch(silent, func(bool) (*tls.Config, error) {
		cfg := &tls.Config{MinVersion: tls.VersionTLS13}
		var err error
		if f.CA != "" {
			if cfg.RootCAs, err = authorities(f.CA); err != nil {
				return nil, err
			}
		}
		if f.Cert != "" || f.Key != "" {
			cert, err := keyPair(f.Cert, f.Key)
			if err != nil {
				return nil, err
			}
			cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil }
		}
		return cfg, nil
	}, f.CA, f.Cert, f.Key)
	c := &clientCredentials{credentials.NewTLS(now.get()), f, now}
	if err != nil || f.Token == "" {
		return c, nil, err
	}
	text, err := watch(silent, func(bool) (string, error) {
		all, err := readTokens(f.Token)
		if err != nil {
			return "", err
		}
		if len(all) == 0 {
			return "", noToken(f.Token)
		}
		return "Bearer " + all[0].text, nil
	}, f.Token)
	return c, &clientToken{text}, err
}

type clientCredentials struct {
	credentials.TransportCredentials // describes the protocol
	files                            ClientFiles
	now                              *watched[*tls.Config]
}

// ClientHandshake secures a connection. Its errors say which side must be fixed.
func (c *clientCredentials) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := credentials.NewTLS(c.now.get()).ClientHandshake(ctx, cmp.Or(c.files.ServerName, authority), raw)
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
	return map[string]string{"authorization": t.now.get()}, nil
}

// RequireTransportSecurity returns true: the token must not be sent unencrypted.
func (*clientToken) RequireTransportSecurity() bool { return true }
