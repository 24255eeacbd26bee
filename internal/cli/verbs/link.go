package verbs

import (
	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/cli/serve"
)

// linkCommand carries the calls of its parent process, such as Python.
func linkCommand() *cobra.Command {
	var fd int
	var cfg client.Config
	c := &cobra.Command{
		Use: "link", Short: "serve the process that started this one, over a socket", Args: Takes(0), Hidden: true,
		Long: `Link is a client for another process on this machine. docs/link.md describes their
protocol. Libraries start it; it is of no use in a shell.`,
		RunE: func(*cobra.Command, []string) error { return serve.Link(fd, cfg) },
	}
	c.Flags().IntVar(&fd, "fd", 3, "descriptor of the socket")
	lanesVar(c.Flags(), &cfg)
	return c
}
