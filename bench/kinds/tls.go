package kinds

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"path/filepath"

	"google.golang.org/grpc/credentials"

	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/bench"
)

// OverTLS goes after the name of a kind that is encrypted as tensorferry is.
const OverTLS = ", TLS"

// encrypted is a kind over connections that are encrypted as tensorferry's are.
func encrypted(name string, k bench.Kind) bench.Kind {
	return bench.Kind{
		Name: name, OwnMemory: k.OwnMemory,
		Serve: func(ctx context.Context, l net.Listener, p bench.Place) error {
			creds, err := serverCredentials(p)
			if err != nil {
				return errors.Join(err, l.Close())
			}
			return k.Serve(ctx, secureListener{l, creds}, p)
		},
		Dial: func(ctx context.Context, p bench.Place) (bench.Client, error) {
			creds, err := clientCredentials(p)
			if err != nil {
				return bench.Client{}, err
			}
			p.Wrap = func(ctx context.Context, conn net.Conn) (net.Conn, error) {
				conn, _, err := creds.ClientHandshake(ctx, "", conn)
				return conn, err
			}
			return k.Dial(ctx, p)
		},
	}
}

// secureListener accepts one client, which it waits for.
type secureListener struct {
	net.Listener
	creds credentials.TransportCredentials
}

func (l secureListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	conn, _, err = l.creds.ServerHandshake(conn)
	return conn, err
}

// serverCredentials returns those of a server, with the certificates in the folder of both ends.
func serverCredentials(p bench.Place) (credentials.TransportCredentials, error) {
	id, err := identity.NewServer(identity.ServerFiles{
		Cert: filepath.Join(p.Dir, identity.ServerFile), Key: filepath.Join(p.Dir, identity.ServerKeyFile),
	}, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, err
	}
	return id.Credentials(), nil
}

// clientCredentials returns those of a client of such a server.
func clientCredentials(p bench.Place) (credentials.TransportCredentials, error) {
	creds, _, err := identity.ClientFiles{CA: filepath.Join(p.Dir, identity.AuthorityFile), ServerName: "localhost"}.Credentials()
	return creds, err
}
