// Package fail has the errors of commands: mistakes in what was typed, hints, the text that people
// read, and exit codes.
package fail

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"syscall"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/reason"
)

// Exit codes, for scripts.
const (
	ExitFailure     = reason.ExitFailure
	ExitUsage       = 2
	ExitConnection  = reason.ExitConnection
	ExitAuth        = reason.ExitAuth
	ExitIntegrity   = reason.ExitIntegrity
	ExitLimit       = reason.ExitLimit
	ExitInterrupted = 7
	ExitDevice      = 8
	ExitSettings    = 78 // sysexits.h: EX_CONFIG. A crash of Go has exitUsage
)

// Exits says what each exit code means.
var Exits = map[int]string{
	0:               "all is done",
	ExitFailure:     "any failure without a code of its own, or a difference that diff found",
	ExitUsage:       "a mistake in what was typed",
	ExitConnection:  "no connection to the server, or it takes nothing now",
	ExitAuth:        "the server does not know or does not allow the caller",
	ExitIntegrity:   "bytes arrived damaged, or not those that were sent",
	ExitLimit:       "over a limit or a budget of the server",
	ExitInterrupted: "interrupted; run it again",
	ExitDevice:      "serve --exit-on-device-loss lost a device",
	ExitSettings:    "a mistake in the settings of serve, which a restart does not mend",
}

// Usage returns a mistake in what was typed.
func Usage(format string, args ...any) error { return Exit(ExitUsage, format, args...) }

// AsUsage makes an error a mistake in what was typed, or in the settings of serve.
func AsUsage(err error) error { return exitError{err, ExitUsage} }

// hintedError is an error and what to do about it.
type hintedError struct {
	error
	hint string
}

func (h hintedError) Unwrap() error { return h.error }

// Hinted adds what to do about it to an error.
func Hinted(err error, hint string) error { return hintedError{err, hint} }

// OfInput makes an error one in the bytes of an input, shown without that of the call it fails.
func OfInput(err error) error { return readError{err} }

// At makes an error one of the server of --to, and not of --server.
func At(err error, server string) error { return toError{namedError{err, server}} }

// Mistake makes an error of what a setting names one of the setting, with the hint it has.
func Mistake(err error) error {
	if h := (hintedError{}); !errors.As(err, &h) {
		err = Hinted(err, "")
	}
	return AsUsage(err)
}

// Lasting makes an error a mistake if it says of a path what stays so until somebody changes it.
func Lasting(err error) error {
	for _, is := range []error{fs.ErrNotExist, fs.ErrPermission, syscall.ENOTDIR, syscall.EROFS} {
		if errors.Is(err, is) {
			return Mistake(err)
		}
	}
	return err
}

// ExitCode returns the exit code of a command that ended with err.
func ExitCode(ctx context.Context, err error) int {
	var x exitError
	switch {
	case errors.As(err, &x): // also of what was interrupted
		return x.code
	case ctx.Err() != nil:
		return ExitInterrupted
	}
	row, _ := Row(err)
	return cmp.Or(row.Exit, ExitFailure)
}

// Row returns what the table of reasons says of an error, if it has one.
func Row(err error) (reason.Row, bool) {
	if e, ok := errors.AsType[*client.Error](err); ok {
		return e.Row(), true
	}
	why := reason.Of(err)
	return reason.Find(why, ""), why != ""
}

// MostErrors is the most lines of an error: a thousand tensors may fail in a thousand ways.
const MostErrors = 10

// joined are the errors that err joins. Texts are not split: a server could forge lines.
func joined(err error) (all []error) {
	inner := reason.Wrapped(err)
	if len(inner) == 0 || errors.Join(inner...).Error() != err.Error() {
		return []error{err}
	}
	for _, e := range inner {
		all = append(all, joined(e)...)
	}
	return all
}

var oneLine = strings.NewReplacer("\r\n", " ", "\n", " ", "\r", " ")

// Text is an error as people read it: one line for each different one that it joins.
func Text(err error) string {
	var lines []string
	for _, e := range joined(err) {
		if r, ok := errors.AsType[readError](e); ok {
			e = r
		}
		line := display.Plain(oneLine.Replace(reason.Plain(e)))
		if !slices.Contains(lines, line) {
			lines = append(lines, line)
		}
	}
	if more := len(lines) - MostErrors; more > 0 {
		lines = append(lines[:MostErrors], fmt.Sprintf("and %d more", more))
	}
	return strings.Join(lines, "\n")
}

// Command is the command that was typed.
type Command struct {
	Path   string // tensorferry pull, or only tensorferry
	Verb   bool   // it is not only tensorferry
	Server string // --server, if it was typed
}

// HintOf says what to do about an error of a command. Commands in it name its --server.
func HintOf(c Command, code int, err error) string {
	at, flag := "", "--server"
	if c.Server != "" {
		at = " --server " + display.Plain(c.Server)
	}
	to, atTo := errors.AsType[toError](err)
	if atTo {
		at, flag = " --server "+display.Plain(to.name), "--to"
	}
	var h hintedError
	switch row, known := Row(err); {
	case errors.As(err, &h):
	case code == ExitUsage && !c.Verb:
		h.hint = "tensorferry help lists the commands"
	case code == ExitUsage:
		h.hint = "see " + c.Path + " --help for usage"
	case known && code != ExitInterrupted:
		h.hint = row.Do
	}
	if atTo && code == ExitAuth {
		h.hint = strings.ReplaceAll(h.hint, "--", "--to-")
	}
	return strings.NewReplacer(reason.Asked, at, reason.Flag, flag).Replace(h.hint)
}

// toError is an error of the server of --to, not of --server.
type toError struct{ namedError }

// In makes an error one of what has a name, such as a file.
func In(name string, err error) error { return namedError{err, name} }

type namedError struct {
	error
	name string
}

func (e namedError) Error() string { return e.name + ": " + e.error.Error() }

// Plain returns the error as people read it: the name is none of a package.
func (e namedError) Plain() string { return e.name + ": " + reason.Plain(e.error) }

func (e namedError) Unwrap() error { return e.error }

// readError is an error in the bytes of an input, shown without that of the call it fails.
type readError struct{ error }

// exitError is an error that ends the command with a code, whatever else it is.
type exitError struct {
	error
	code int
}

func (e exitError) Unwrap() error { return e.error }

// Exit is an error that ends the command with a code.
func Exit(code int, format string, args ...any) error {
	return exitError{fmt.Errorf(format, args...), code}
}
