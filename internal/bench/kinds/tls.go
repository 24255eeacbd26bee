package kinds

import (
	"log/slog"
	"path/filepath"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/bench"
)

// OverTLS goes after the name of a kind that is encrypted as tensorferry is.
const OverTLS = ", TLS"

// serverCredentials returns those of a server, with certificates in the folder of both
// ends if they are to encrypt.
func serverCredentials(p bench.Place, secure bool) (credentials.TransportCredentials, error) {
	if !secure {
		return insecure.NewCredentials(), nil
	}
	if _, err := identity.WriteCertificates(p.Dir, nil, "bench"); err != nil {
		return nil, err
	}
	id, err := identity.NewServer(identity.ServerFiles{
		Cert: filepath.Join(p.Dir, identity.ServerFile), Key: filepath.Join(p.Dir, identity.ServerKeyFile),
	}, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, err
	}
	return id.Credentials(), nil
}

// clientCredentials returns those of a client of such a server.
func clientCredentials(p bench.Place, secure bool) (credentials.TransportCredentials, error) {
	if !secure {
		return insecure.NewCredentials(), nil
	}
	creds, _, err := identity.ClientFiles{CA: filepath.Join(p.Dir, identity.AuthorityFile), ServerName: "localhost"}.Credentials()
	return creds, err
}
