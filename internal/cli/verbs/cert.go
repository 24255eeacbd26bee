package verbs

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
)

func certCommand() *cobra.Command {
	var hosts []string
	var client string
	var asJSON bool
	c := &cobra.Command{
		Use:   "cert FOLDER",
		Short: "create certificates for trying out TLS",
		Long: `Cert creates a certificate authority (CA), a server certificate and a client
certificate in FOLDER, each with its private key. A CA that FOLDER already has is
kept and signs the new certificates, which are valid for a year. So is a server
certificate, unless --host is given: to add a client, give only --client.

A server needs server.pem, server-key.pem and, to verify clients, ca.pem. A client
needs ca.pem and, to identify itself, NAME.pem and NAME-key.pem, where NAME is that
of --client. Keep ca-key.pem secret: anyone who has it can create certificates that
both sides trust.`,
		Example: `  tensorferry cert certs --host ferry.example.org --client alice
  tensorferry serve --listen 0.0.0.0:50051 --tls-client-ca certs/ca.pem \
      --tls-cert certs/server.pem --tls-key certs/server-key.pem
  tensorferry models --server ferry.example.org:50051 --ca certs/ca.pem \
      --cert certs/alice.pem --key certs/alice-key.pem`,
		Args: Takes(1, "FOLDER"),
		RunE: func(c *cobra.Command, args []string) error {
			written, err := identity.WriteCertificates(args[0], hosts, client)
			if errors.Is(err, identity.ErrName) {
				return fail.AsUsage(err)
			}
			if err != nil {
				return err
			}
			files := display.Each(written, func(file string) string { return filepath.Join(args[0], file) })
			return display.NewPrinter(c.OutOrStdout(), asJSON).Print(files, func(w io.Writer) { fmt.Fprintln(w, strings.Join(files, "\n")) })
		},
	}
	c.Flags().StringArrayVar(&hosts, "host", nil, "`name` or IP address of the server, in addition to localhost; repeatable")
	c.Flags().StringVar(&client, "client", "client", "`name` of the client")
	jsonFlag(c, &asJSON)
	return c
}
