package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/client/retry"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/identity"
)

// access says how a command reaches its server.
type access struct {
	server string
	tls    bool
	files  identity.ClientFiles
	cfg    client.Config // but for codec and credentials
	codec  string        // empty: none
}

// flags adds --server and the flags of identity.
func (a *access) flags(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&a.server, "server", cmp.Or(os.Getenv(variable("server")), defaultListen), "`address` of the server: host:port or unix:/path;\nalso "+variable("server"))
	c.Flag("server").DefValue = defaultListen // --help does not depend on the environment
	a.identityFlags(c)
	a.waitFlags(c)
}

// waitFlags adds the flags for servers that cannot be reached.
func (a *access) waitFlags(c *cobra.Command) {
	f := c.Flags()
	durationVar(f, &a.cfg.Wait, "wait", 0, 0, "how long to wait for a server that cannot be reached")
	policy := "none"
	set := func(text string) (err error) {
		a.cfg.Retry, err = retry.Parse(text)
		policy = text
		return err
	}
	f.Var(option{kind: "policy", set: set, text: func() string { return policy }}, "retry", "when to repeat what failed and may be repeated: none,\nexponential, adaptive, fixed, or after waits such as\n100ms,1s (docs/retries.md)")
	durationVar(f, &a.cfg.RetryFor, "retry-for", client.DefaultRetryFor, time.Millisecond, "no attempt begins later than this after the first one")
}

// identityFlags adds the flags that identify the client, by default environment variables.
func (a *access) identityFlags(c *cobra.Command) {
	f, env := c.Flags(), variable("tls")
	f.BoolVar(&a.tls, "tls", !slices.Contains([]string{"", "0", "false"}, os.Getenv(env)), "use TLS and the CAs that this system trusts; also "+env+"=1")
	c.Flag("tls").DefValue = "false"
	for _, s := range fileFlags(&a.files) {
		env := variable(s.flag)
		f.StringVar(s.value, s.flag, os.Getenv(env), s.text+"; also "+env)
		c.Flag(s.flag).DefValue = ""
	}
}

type fileFlag struct {
	flag, text string
	value      *string
}

func fileFlags(files *identity.ClientFiles) []fileFlag {
	return []fileFlag{
		{"ca", "`file` with the CA of the server's certificate", &files.CA},
		{"cert", "`file` with the client's certificate", &files.Cert},
		{"key", "`file` with the client's private key", &files.Key},
		{"token", "`file` with the client's token", &files.Token},
		{"server-name", "`name` in the server's certificate\n(default the host in its address)", &files.ServerName},
	}
}

// dial connects to the server. The caller closes the client.
func (a *access) dial() (*client.Client, error) {
	var err error
	cfg := a.cfg
	cfg.Codec, _ = codec.ParseCodec(a.codec) // the flag has checked it
	if cfg.Retry != nil {
		cfg.Retry = func(failed retry.Attempt) (time.Duration, bool) {
			wait, again := a.cfg.Retry(failed)
			if again {
				fmt.Fprintf(os.Stderr, "tensorferry: %s; again in %v\n", said(failed.Err), about(wait))
			}
			return wait, again
		}
	}
	if a.tls || a.files != (identity.ClientFiles{}) {
		if (a.files.Cert == "") != (a.files.Key == "") {
			return nil, usage("--cert and --key go together")
		}
		if _, err := os.Stat(a.files.Token); a.files.Token != "" && errors.Is(err, fs.ErrNotExist) { // the name may be the token itself
			return nil, errors.New("--token: no such file; it names a file that holds the token")
		}
		if cfg.Credentials, cfg.PerRPC, err = a.files.Credentials(); err != nil {
			return nil, hinted{err, "tensorferry cert creates files for --ca, --cert and --key; openssl rand -hex 32 makes a token"}
		}
	}
	for _, path := range []string{a.files.Key, a.files.Token} {
		if identity.OthersRead(path) {
			fmt.Fprintf(os.Stderr, "tensorferry: other users can read %s: chmod o-r\n", path)
		}
	}
	cl, err := client.Dial(a.server, cfg)
	if err != nil {
		return nil, usageError{err}
	}
	return cl, nil
}

// asking makes c print the answer that ask gets from the server of its flags.
func asking(c *cobra.Command, ask func(ctx context.Context, cl *client.Client, args []string, out printer) error) *cobra.Command {
	var a access
	var asJSON bool
	a.flags(c)
	jsonFlag(c, &asJSON)
	c.RunE = func(c *cobra.Command, args []string) error {
		cl, err := a.dial()
		if err != nil {
			return err
		}
		defer cl.Close()
		return ask(c.Context(), cl, args, printer{c.OutOrStdout(), asJSON})
	}
	return c
}

// remote are the flags of a command that moves tensors to or from a server.
type remote struct {
	access
	quiet, timings, asJSON bool
}

func (r *remote) flags(c *cobra.Command) {
	r.access.flags(c)
	quietFlag(c, &r.quiet)
	jsonFlag(c, &r.asJSON)
	lanesVar(c.Flags(), &r.cfg)
	c.Flags().BoolVar(&r.timings, "timings", false, "print where time was spent, how many lanes there were,\nand why not more")
	choiceVar(c, &r.codec, "codec", "compress chunks in transit", codec.None.String(), codec.LZ4.String())
}

// pipeFlag adds the flag of a command whose input or output may be an idle pipe.
func (r *remote) pipeFlag(c *cobra.Command) {
	durationVar(c.Flags(), &r.cfg.InputIdle, "input-idle", 0, 0, "how long input and output may be idle; 0 is the server's limit")
}

// dialPipes is like dial. The context ends with ctx, or when a Reader or Writer of the client
// has been idle for too long.
func (r *remote) dialPipes(ctx context.Context) (*client.Client, context.Context, error) {
	ctx, r.cfg.Idled = context.WithCancelCause(ctx)
	cl, err := r.dial()
	return cl, ctx, err
}

// tell says, if asked to, how bytes have been carried.
func (r *remote) tell(stderr io.Writer, w client.Ways) {
	if r.timings {
		fmt.Fprintf(stderr, "lanes carried %d of %d bytes sent, %d of %d received; %d open: %s\n", w.LaneSentBytes, w.SentBytes, w.LaneReceivedBytes, w.ReceivedBytes, w.Lanes, w.Why)
	}
}
