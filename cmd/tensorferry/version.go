package main

import (
	"fmt"
	"io"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version ends in -dev between releases.
const version = "0.1.0-dev"

// versionJSON is what version --json prints.
type versionJSON struct {
	Version string `json:"version"`
	// Commit is the commit of the build, followed by + if the working tree had changes. It
	// is absent if the build did not record it.
	Commit   string `json:"commit,omitempty"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

func versionCommand() *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use: "version", Short: "print the version", Args: takes(0),
		Long: `Version prints the version. With --json, it also prints the commit, the Go version and
the platform of the build.`,
		RunE: func(c *cobra.Command, _ []string) error {
			v := versionJSON{version, commit(), runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH}
			return printer{c.OutOrStdout(), asJSON}.print(v, func(w io.Writer) { fmt.Fprintln(w, version) })
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
	text := ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			text = s.Value + text
		case s.Key == "vcs.modified" && s.Value == "true":
			text += "+"
		}
	}
	return text
}
