package verbs

import (
	"context"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/internal/cli/serve"
	"github.com/tensorferry/tensorferry/internal/cli/settings"
)

func serveCommand() *cobra.Command {
	var cfg serve.Config
	var child, printed bool
	c := &cobra.Command{
		Use:   "serve",
		Short: "serve the built-in models and your own",
		Long: `Serve runs a server until it is interrupted. It then accepts no new calls, gives open
calls some time to finish (--drain), and exits; the exit code is 1 if it had to cancel
calls. A second interrupt, half a second or more after the first, ends it immediately.

A model is a folder with model.json and weights.safetensors (docs/engine.md), or
Python code that runs in its own processes (docs/worker.md). TENSORFERRY_PYTHON names
the Python interpreter; the default is python3.

Flags can also be set as environment variables (TENSORFERRY_MAX_CALLS for --max-calls)
or in a YAML file (max-calls: 100). A flag overrides the environment, and the
environment overrides the file. Sizes are in bytes or have a unit, such as 512MiB or
2GB; durations are written as 10s, 1m30s or 250ms. See docs/operating.md.`,
		Example: `  tensorferry serve
  tensorferry serve --listen unix:/tmp/ferry.sock --model trunk=models/trunk
  tensorferry serve --python trunk=models:make_trunk --python-processes 2
  tensorferry serve --config ferry.yaml --print-config`,
		Args: Takes(0),
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, cancel := context.WithCancel(c.Context())
			defer cancel()
			environ, ready := os.Environ(), io.Discard
			if child {
				// The parent has set everything, and several children may run at once.
				environ, ready = nil, c.OutOrStdout()
				cfg.Child()
				go func() { // ends with stdin, at the latest with the process
					_, _ = io.Copy(io.Discard, c.InOrStdin())
					cancel()
				}()
			}
			from, services, err := settings.Configure(c.Flags(), environ)
			cfg.Services, cfg.Former = services, settings.Former(c.Flags(), from)
			switch {
			case err != nil:
				return err
			case printed:
				return settings.Print(c.OutOrStdout(), c.Flags(), from)
			}
			return serve.Run(ctx, cfg, ready)
		},
	}
	f := c.Flags()
	cfg.Flags(f)
	f.String("config", "", "read settings from a YAML `file`; also TENSORFERRY_CONFIG")
	f.BoolVar(&printed, "print-config", false, "print all settings as a config file, with origins, and exit")
	f.BoolVar(&child, "child", false, "print the address to stdout, and stop when stdin ends")
	f.StringVar(&cfg.Engines.PythonFD, "python-fd", "", "serve the Python process at the other end of a socket, as `name=descriptor`, and exit when it does")
	f.Lookup("child").Hidden, f.Lookup("python-fd").Hidden = true, true
	complete(c, "engine", []string{serve.AutoEngine, serve.CPUEngine})
	return c
}
