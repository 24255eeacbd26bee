package main

import (
	"encoding/json"
	"io"

	"github.com/spf13/cobra"
)

// jsonFlag adds --json, which every command has that prints what a script may read.
// What it prints is one JSON value on stdout: a list where there may be several
// things, even of one. Names are in snake case, sizes in bytes, times in what their
// name says; what is not known is absent. A command that fails prints none, but for
// one that stores several tensors: it tells how each of them ended.
func jsonFlag(c *cobra.Command, to *bool) {
	c.Flags().BoolVar(to, "json", false, "print JSON")
}

func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(v)
}
