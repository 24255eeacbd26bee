// Package display writes what commands print: JSON for scripts, tables and sizes for people. What
// a server says reaches neither as a command to a terminal.
package display

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/tensorferry/tensorferry/tensor"
)

// Printer prints what a command has to say.
type Printer struct {
	w    io.Writer
	JSON bool
}

// NewPrinter returns a printer of JSON, or of tables.
func NewPrinter(w io.Writer, json bool) Printer { return Printer{w, json} }

// Print prints v as JSON, or the lines that table writes, whose tabs it aligns.
func (p Printer) Print(v any, table func(w io.Writer)) error {
	if p.JSON {
		return JSON(p.w, v)
	}
	w := tabwriter.NewWriter(p.w, 0, 4, 2, ' ', 0)
	table(w)
	return w.Flush()
}

// JSON writes v as JSON, with what a server may have put into texts escaped.
func JSON(w io.Writer, v any) error {
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

// Each returns what f makes of each element of a list. It is never nil: that is null in JSON.
func Each[T, U any](list []T, f func(T) U) []U {
	made := make([]U, len(list))
	for i, v := range list {
		made[i] = f(v)
	}
	return made
}

// Desc is a tensor.Desc as JSON has it.
type Desc struct {
	DType string       `json:"dtype"`
	Shape tensor.Shape `json:"shape"`
}

// Describe returns a desc as JSON has it.
func Describe(d tensor.Desc) Desc {
	return Desc{d.DType.String(), append(tensor.Shape{}, d.Shape...)}
}

const ramp = " ▁▂▃▄▅▆▇█" // draws a bin of a histogram, from none to many elements

// Plain replaces what is not printable in a name: it may command a terminal.
func Plain(name string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return utf8.RuneError
	}, name)
}

// Bars draws counts: the largest as the last of ramp, and only zeros as the first.
func Bars(counts []int64) string {
	levels := []rune(ramp)
	var b strings.Builder
	for _, n := range counts {
		level := math.Ceil(float64(n) / float64(slices.Max(counts)) * float64(len(levels)-1))
		b.WriteRune(levels[int(level)])
	}
	return b.String()
}

// Size formats a number of bytes in a readable unit.
func Size(n int64) string {
	text := fmt.Sprintf("%d bytes", n)
	for i, unit := range []string{"KiB", "MiB", "GiB", "TiB"} {
		if in := float64(n) / math.Ldexp(1, 10*(i+1)); in >= 1 && (in < 1024 || unit == "TiB") {
			return fmt.Sprintf("%.1f %s", in, unit)
		}
	}
	return text
}
