package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

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

// What is in it may be a server's word: it is written with nothing that a terminal obeys.
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

// printable escapes characters that are not printed, as JSON does those below a space:
// beyond ASCII there are none outside of strings.
func printable(text []byte) []byte {
	out := make([]byte, 0, len(text))
	for len(text) > 0 {
		r, n := utf8.DecodeRune(text)
		switch {
		case r < 0x7f || unicode.IsPrint(r):
			out = append(out, text[:n]...)
		case r <= math.MaxUint16:
			out = fmt.Appendf(out, `\u%04x`, r)
		default:
			high, low := utf16.EncodeRune(r)
			out = fmt.Appendf(out, `\u%04x\u%04x`, high, low)
		}
		text = text[n:]
	}
	return out
}
