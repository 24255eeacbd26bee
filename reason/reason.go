// Package reason has the table of what a user may meet as a failure: what it is called on the
// wire, what it means, what to do about it, and with which code a program exits.
//
// It decides nothing: who finds a failure says which it is. It imports nothing of this module,
// so that whoever finds one can.
package reason

import (
	"errors"
	"regexp"
	"slices"
	"strings"
)

// Reason says why something failed, as google.rpc.ErrorInfo does: in upper case, for programs.
// The general ones are named as their gRPC codes are.
type Reason string

// Domain is the domain of reasons in a google.rpc.ErrorInfo.
const Domain = "tensorferry"

// Side is who can mend what failed.
type Side string

// The sides.
const (
	Client Side = "client"
	Server Side = "server"
	Either Side = "either"
)

// What stands in Row.Do for the flag that names the server, and for the flag with what it was
// given, if it was.
const (
	Flag  = "{flag}"
	Asked = "{server}"
)

// Row says what one Reason means.
type Row struct {
	Reason Reason
	Code   Reason // the general reason, which is gRPC's name of the code
	Side   Side
	Retry  bool   // the same may succeed later
	Exit   int    // the program's exit code
	Title  string // what it is, for people
	Do     string // what to do about it, for who uses the program; may be empty
}

// Exit codes of the program.
const (
	ExitFailure    = 1
	ExitConnection = 3
	ExitAuth       = 4
	ExitIntegrity  = 5
	ExitLimit      = 6
)

// Find returns the row of a reason, or that of its code if the reason is empty or one that only
// a newer peer knows.
func Find(r Reason, code string) Row {
	for _, name := range []Reason{r, Reason(code), "UNKNOWN"} {
		if i := slices.IndexFunc(Table, func(row Row) bool { return row.Reason == name }); i >= 0 {
			return Table[i]
		}
	}
	return Row{}
}

// New returns an error to be wrapped that carries a reason.
func New(r Reason, text string) error { return &carrier{r, text} }

type carrier struct {
	reason Reason
	text   string
}

func (c *carrier) Error() string { return c.text }

// Why returns the reason.
func (c *carrier) Why() Reason { return c.reason }

// Of returns the reason that an error carries, or the first one that it wraps, or none.
func Of(err error) Reason {
	if e, ok := errors.AsType[interface {
		error
		Why() Reason
	}](err); ok {
		return e.Why()
	}
	return ""
}

// Plain returns what an error says to people: without the names of packages that errors begin
// with, its own and those of errors that it wraps.
func Plain(err error) string {
	if own, ok := err.(interface{ Plain() string }); ok { // it, not what it wraps
		return own.Plain()
	}
	text := err.Error()
	pkg := name.FindString(text)
	for _, inner := range Wrapped(err) {
		if strings.HasPrefix(text, inner.Error()) {
			pkg = "" // it is the inner one's
		}
		text = strings.Replace(text, inner.Error(), Plain(inner), 1)
	}
	return strings.TrimPrefix(text, pkg)
}

// name matches the name of a package at the beginning of an error.
var name = regexp.MustCompile(`^[a-z]+[0-9]*: `)

// Wrapped returns the errors that one wraps itself, in their order.
func Wrapped(err error) []error {
	switch e := err.(type) { //nolint:errorlint // it, not what it wraps
	case interface{ Unwrap() []error }:
		return e.Unwrap()
	case interface{ Unwrap() error }:
		if inner := e.Unwrap(); inner != nil {
			return []error{inner}
		}
	}
	return nil
}

// Parse returns the reason that a peer gives, or none if it is not one.
func Parse(text string) Reason {
	if len(text) > Bytes || strings.Trim(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_") != "" {
		return ""
	}
	return Reason(text)
}
