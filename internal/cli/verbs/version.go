package verbs

import (
	"fmt"
	"io"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/serve"
)

type versionJSON struct {
	Version string `json:"version"`
	// Commit is that of the build, if it was recorded, and + if the tree had changes.
	Commit   string `json:"commit,omitempty"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

func versionCommand() *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use: "version", Short: "print the version", Args: Takes(0),
		Long: `Version prints the version. With --json, it also prints the commit, the Go version and
the platform of the build.`,
		RunE: func(c *cobra.Command, _ []string) error {
			v := versionJSON{Version: serve.Version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
			if info, ok := debug.ReadBuildInfo(); ok {
				for _, s := range info.Settings {
					switch {
					case s.Key == "vcs.revision":
						v.Commit = s.Value + v.Commit
					case s.Key == "vcs.modified" && s.Value == "true":
						v.Commit += "+"
					}
				}
			}
			return display.NewPrinter(c.OutOrStdout(), asJSON).Print(v, func(w io.Writer) { fmt.Fprintln(w, serve.Version) })
		},
	}
	jsonFlag(c, &asJSON)
	return c
}
