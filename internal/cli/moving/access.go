// Package moving has commands that move tensors between files and a server, between servers, and
// through models; and what a server's store has of the names that people type.
package moving

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/client/retry"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
)

// Access says how a command reaches its server.
type Access struct {
	Server string
	TLS    bool
	Files  identity.ClientFiles
	Cfg    client.Config // but for codec and credentials
	Codec  string        // empty: none
}

// FileFlag is a flag for a file that identifies a client.
type FileFlag struct {
	Flag, Text string
	Value      *string
}

// FileFlags returns the flags for the files that identify a client.
func FileFlags(files *identity.ClientFiles) []FileFlag {
	return []FileFlag{
		{"ca", "`file` with the CA of the server's certificate", &files.CA},
		{"cert", "`file` with the client's certificate", &files.Cert},
		{"key", "`file` with the client's private key", &files.Key},
		{"token", "`file` with the client's token", &files.Token},
		{"server-name", "`name` in the server's certificate\n(default the host in its address)", &files.ServerName},
	}
}

// Dial connects to the server. The caller closes the client.
func (a *Access) Dial() (*client.Client, error) {
	var err error
	cfg := a.Cfg
	cfg.Codec, _ = codec.ParseCodec(a.Codec) // the flag has checked it
	if cfg.Retry != nil {
		cfg.Retry = func(failed retry.Attempt) (time.Duration, bool) {
			wait, again := a.Cfg.Retry(failed)
			if again {
				fmt.Fprintf(os.Stderr, "tensorferry: %s; again in %v\n", fail.Text(failed.Err), rounded(wait))
			}
			return wait, again
		}
	}
	if a.TLS || a.Files != (identity.ClientFiles{}) {
		if (a.Files.Cert == "") != (a.Files.Key == "") {
			return nil, fail.Usage("--cert and --key go together")
		}
		if _, err := os.Stat(a.Files.Token); a.Files.Token != "" && errors.Is(err, fs.ErrNotExist) { // the name may be the token itself
			return nil, errors.New("--token: no such file; it names a file that holds the token")
		}
		if cfg.Credentials, cfg.PerRPC, err = a.Files.Credentials(); err != nil {
			return nil, fail.Hinted(err, "tensorferry cert creates files for --ca, --cert and --key; openssl rand -hex 32 makes a token")
		}
	}
	for _, path := range []string{a.Files.Key, a.Files.Token} {
		if identity.OthersRead(path) {
			fmt.Fprintf(os.Stderr, "tensorferry: other users can read %s: chmod o-r\n", path)
		}
	}
	cl, err := client.Dial(a.Server, cfg)
	if err != nil {
		return nil, fail.AsUsage(err)
	}
	return cl, nil
}

// Remote are the flags of a command that moves tensors to or from a server.
type Remote struct {
	Access
	Quiet, Timings, AsJSON bool
}

// dialPipes is like dial. The context ends with ctx, or when a Reader or Writer of the client
// has been idle for too long.
func (r *Remote) dialPipes(ctx context.Context) (*client.Client, context.Context, error) {
	ctx, r.Cfg.Idled = context.WithCancelCause(ctx)
	cl, err := r.Dial()
	return cl, ctx, err
}

// printWays says, if asked to, how bytes have been carried.
func (r *Remote) printWays(stderr io.Writer, w client.Ways) {
	if r.Timings {
		fmt.Fprintf(stderr, "lanes carried %d of %d bytes sent, %d of %d received; %d open: %s\n", w.LaneSentBytes, w.SentBytes, w.LaneReceivedBytes, w.ReceivedBytes, w.Lanes, w.Why)
	}
}
