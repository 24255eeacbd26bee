package verbs

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/client/retry"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/files"
	"github.com/tensorferry/tensorferry/internal/cli/moving"
	"github.com/tensorferry/tensorferry/internal/cli/serve"
	"github.com/tensorferry/tensorferry/internal/cli/settings"
	"github.com/tensorferry/tensorferry/server"
)

// accessFlags adds --server and the flags of identity.
func accessFlags(c *cobra.Command, a *moving.Access) {
	f := c.Flags()
	f.StringVar(&a.Server, "server", cmp.Or(os.Getenv(settings.Variable("server")), serve.DefaultListen), "`address` of the server: host:port or unix:/path;\nalso "+settings.Variable("server"))
	c.Flag("server").DefValue = serve.DefaultListen // --help does not depend on the environment
	identityFlags(c, a)
	waitFlags(c, a)
}

// waitFlags adds the flags for servers that cannot be reached.
func waitFlags(c *cobra.Command, a *moving.Access) {
	f := c.Flags()
	settings.Duration(f, &a.Cfg.Wait, "wait", 0, 0, "how long to wait for a server that cannot be reached")
	policy := "none"
	set := func(text string) (err error) {
		a.Cfg.Retry, err = retry.Parse(text)
		policy = text
		return err
	}
	settings.Option(f, "retry", "policy", "when to repeat what failed and may be repeated: none,\nexponential, adaptive, fixed, or after waits such as\n100ms,1s (docs/retries.md)", set, func() string { return policy })
	settings.Duration(f, &a.Cfg.RetryFor, "retry-for", client.DefaultRetryFor, time.Millisecond, "no attempt begins later than this after the first one")
}

// identityFlags adds the flags that identify the client, by default environment variables.
func identityFlags(c *cobra.Command, a *moving.Access) {
	f, env := c.Flags(), settings.Variable("tls")
	f.BoolVar(&a.TLS, "tls", !slices.Contains([]string{"", "0", "false"}, os.Getenv(env)), "use TLS and the CAs that this system trusts; also "+env+"=1")
	c.Flag("tls").DefValue = "false"
	for _, s := range moving.FileFlags(&a.Files) {
		env := settings.Variable(s.Flag)
		f.StringVar(s.Value, s.Flag, os.Getenv(env), s.Text+"; also "+env)
		c.Flag(s.Flag).DefValue = ""
	}
}

// asking makes c print the answer that ask gets from the server of its flags.
func asking(c *cobra.Command, ask func(ctx context.Context, cl *client.Client, args []string, out display.Printer) error) *cobra.Command {
	var a moving.Access
	var asJSON bool
	accessFlags(c, &a)
	jsonFlag(c, &asJSON)
	c.RunE = func(c *cobra.Command, args []string) error {
		cl, err := a.Dial()
		if err != nil {
			return err
		}
		defer cl.Close()
		return ask(c.Context(), cl, args, display.NewPrinter(c.OutOrStdout(), asJSON))
	}
	return c
}

func remoteFlags(c *cobra.Command, r *moving.Remote) {
	accessFlags(c, &r.Access)
	quietFlag(c, &r.Quiet)
	jsonFlag(c, &r.AsJSON)
	lanesVar(c.Flags(), &r.Cfg)
	c.Flags().BoolVar(&r.Timings, "timings", false, "print where time was spent, how many lanes there were,\nand why not more")
	settings.Choice(c.Flags(), &r.Codec, "codec", "compress chunks in transit", codec.None.String(), codec.LZ4.String())
}

// pipeFlag adds the flag of a command whose input or output may be an idle pipe.
func pipeFlag(c *cobra.Command, r *moving.Remote) {
	settings.Duration(c.Flags(), &r.Cfg.InputIdle, "input-idle", 0, 0, "how long input and output may be idle; 0 is the server's limit")
}

// lanesVar adds the flags for the connections of a client.
func lanesVar(f *pflag.FlagSet, cfg *client.Config) {
	cfg.Lanes = server.DefaultLanes
	set := func(text string) error {
		digits, fixed := strings.CutPrefix(text, "=")
		n, err := strconv.Atoi(digits)
		if err != nil || n < 0 || n > server.DefaultLanes || fixed && n == 0 {
			return fmt.Errorf("use 0 to %d, or =1 to =%d", server.DefaultLanes, server.DefaultLanes)
		}
		cfg.Lanes, cfg.FixedLanes = cmp.Or(n, -1), fixed // 0 would be the default
		return nil
	}
	text := func() string { return map[bool]string{true: "="}[cfg.FixedLanes] + strconv.Itoa(max(cfg.Lanes, 0)) }
	settings.Option(f, "lanes", "count", "the most extra connections for large tensors, opened as long as each\nstep is faster; =N opens N; 0 is none", set, text)
	f.BoolVar(&cfg.BBR, "bbr", false, serve.BBRText)
}

func rawFlags(c *cobra.Command, r *files.RawInput) {
	dtypeFlag(c, &r.DType, "", "data `type` of raw input, such as float32")
	c.Flags().StringVar(&r.Shape, "shape", "", "`shape` of raw input, such as 1000,64; empty is a scalar")
	r.Shaped = func() bool { return c.Flags().Changed("shape") }
}

// sourceFlagsOf adds the flags that make a server generate a tensor.
func sourceFlagsOf(c *cobra.Command, o *moving.SourceFlags) {
	c.Flags().BoolVar(&o.Source, "source", false, "NAME is a source of the server, not a tensor")
	c.Flags().StringArrayVarP(&o.Params, "param", "p", nil, "parameter of the source, `key=value`; repeatable")
}
