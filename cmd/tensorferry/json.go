package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/tensor"
)

// jsonFlag adds --json to a command whose output a script may read; docs/commands.md says what
// it prints. A command that fails prints nothing, with two exceptions: one that stores several
// tensors prints the result of each, and diff prints the differences.
func jsonFlag(c *cobra.Command, to *bool) {
	c.Flags().BoolVar(to, "json", false, "print JSON")
}

type printer struct {
	w    io.Writer
	json bool
}

// print prints v as JSON, or the lines that table writes, whose tabs it aligns.
func (p printer) print(v any, table func(w io.Writer)) error {
	if p.json {
		return writeJSON(p.w, v)
	}
	w := tabwriter.NewWriter(p.w, 0, 4, 2, ' ', 0)
	table(w)
	return w.Flush()
}

// writeJSON writes v as JSON, with what a server may have put into texts escaped.
func writeJSON(w io.Writer, v any) error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		return err
	}
	_, err := w.Write(printable(b.Bytes()))
	return err
}

// printable escapes characters that are not printable, as JSON does below U+0020. They
// can only occur in strings: the rest of JSON is ASCII.
func printable(text []byte) []byte {
	var out []byte
	for _, r := range string(text) {
		if r < 0x7f || unicode.IsPrint(r) {
			out = utf8.AppendRune(out, r)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, r) {
			out = fmt.Appendf(out, `\u%04x`, unit)
		}
	}
	return out
}

// each returns what f makes of each element of a list. It is never nil: that is null in JSON.
func each[T, U any](list []T, f func(T) U) []U {
	made := make([]U, len(list))
	for i, v := range list {
		made[i] = f(v)
	}
	return made
}

type descJSON struct {
	DType string       `json:"dtype"`
	Shape tensor.Shape `json:"shape"`
}

func describe(d tensor.Desc) descJSON {
	return descJSON{d.DType.String(), append(tensor.Shape{}, d.Shape...)}
}
