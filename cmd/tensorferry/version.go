package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version ends in -dev between releases.
const version = "0.1.0-dev"

// versionJSON is what version --json prints.
type versionJSON struct {
	Version string `json:"version"`
	// Commit that the binary was built from, with + behind it if there were changes
	// beside it; absent if the build did not look.
	Commit   string `json:"commit,omitempty"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

func versionCommand() *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use: "version", Short: "print the version", Args: takes(0),
		Long: `Version prints the version; with --json also the commit, the Go version and the
platform that the binary was built for.`,
		RunE: func(c *cobra.Command, _ []string) error {
			if asJSON {
				return writeJSON(c.OutOrStdout(), versionJSON{version, commit(), runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH})
			}
			_, err := fmt.Fprintln(c.OutOrStdout(), version)
			return err
		},
	}
	jsonFlag(c, &asJSON)
	return c
}

func commit() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	var revision, changed string
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			revision = s.Value
		case s.Key == "vcs.modified" && s.Value == "true":
			changed = "+"
		}
	}
	if revision == "" {
		return ""
	}
	return revision + changed
}
