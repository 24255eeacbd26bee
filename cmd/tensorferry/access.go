package main

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/identity"
)

// access says how a command reaches its server. An empty codec means none.
type access struct {
	server string
	tls    bool
	files  identity.ClientFiles
	codec  string
}

// flags adds --server and the flags of identity, and completes names of the server's tensors.
func (a *access) flags(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&a.server, "server", cmp.Or(os.Getenv(variable("server")), defaultListen), "`address` of the server: host:port or unix:/path;\nalso "+variable("server"))
	c.Flag("server").DefValue = defaultListen // --help does not depend on the environment
	a.identityFlags(c)
	if strings.Contains(c.Use, "NAME...") {
		c.ValidArgsFunction = a.completeStored
	}
}

// identityFlags adds the flags that identify the client. Each one's default is an
// environment variable.
func (a *access) identityFlags(c *cobra.Command) {
	f, env := c.Flags(), variable("tls")
	f.BoolVar(&a.tls, "tls", !slices.Contains([]string{"", "0", "false"}, os.Getenv(env)), "use TLS and the CAs that this system trusts; also "+env+"=1")
	c.Flag("tls").DefValue = "false"
	for _, s := range []struct {
		flag, text string
		value      *string
	}{ // they imply --tls
		{"ca", "`file` with the CA of the server's certificate", &a.files.CA},
		{"cert", "`file` with the client's certificate", &a.files.Cert},
		{"key", "`file` with the client's private key", &a.files.Key},
		{"token", "`file` with the client's token", &a.files.Token},
		{"server-name", "`name` in the server's certificate\n(default the host in its address)", &a.files.ServerName},
	} {
		env := variable(s.flag)
		f.StringVar(s.value, s.flag, os.Getenv(env), s.text+"; also "+env)
		c.Flag(s.flag).DefValue = ""
	}
}

// dial connects to the server with cfg, codec and credentials. The caller closes the client.
func (a *access) dial(cfg client.Config) (*client.Client, error) {
	k, err := codec.ParseCodec(cmp.Or(a.codec, codec.None.String()))
	if err != nil {
		return nil, usage("--codec: unknown codec %q; use none or lz4", a.codec)
	}
	cfg.Codec = k
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
		cl, err := a.dial(client.Config{})
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
	quiet bool
}

func (r *remote) flags(c *cobra.Command) {
	r.access.flags(c)
	quietFlag(c, &r.quiet)
	c.Flags().StringVar(&r.codec, "codec", codec.None.String(), "compress chunks in transit: none or lz4")
	complete(c, "codec", []string{codec.None.String(), codec.LZ4.String()})
}

// completionWait is how long completion waits for a server.
const completionWait = time.Second

// completeStored completes the names of a server's tensors, with --source its sources.
func (a *access) completeStored(c *cobra.Command, _ []string, start string) ([]cobra.Completion, cobra.ShellCompDirective) {
	return a.complete(c, start, func(ctx context.Context, cl *client.Client) ([]string, error) {
		list, sources, err := cl.List(ctx, "")
		if source := c.Flag("source"); source != nil && source.Value.String() == "true" {
			return sources, err
		}
		return each(list, func(s client.Stored) string { return s.Name }), err
	})
}

// completeModels completes the name of a model of a server, as the only argument.
func (a *access) completeModels(c *cobra.Command, args []string, start string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.complete(c, start, func(ctx context.Context, cl *client.Client) ([]string, error) {
		models, err := cl.Models(ctx)
		return each(models, (*pb.Model).GetName), err
	})
}

// complete completes start with names from the server, or with none if it does not answer.
func (a *access) complete(c *cobra.Command, start string, names func(context.Context, *client.Client) ([]string, error)) (list []cobra.Completion, _ cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(c.Context(), completionWait)
	defer cancel()
	if cl, err := a.dial(client.Config{}); err == nil {
		defer cl.Close()
		list, _ = names(ctx, cl)
	}
	list = slices.DeleteFunc(list, func(name string) bool { return !strings.HasPrefix(name, start) || plain(name) != name })
	return list, cobra.ShellCompDirectiveNoFileComp
}
