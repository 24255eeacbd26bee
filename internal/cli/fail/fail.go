// Package fail has the errors of commands: mistakes in what was typed, hints, the text that people
// read, and exit codes.
package fail

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

// Exit codes, for scripts.
const (
	ExitFailure     = 1
	ExitUsage       = 2
	ExitConnection  = 3
	ExitAuth        = 4
	ExitIntegrity   = 5
	ExitLimit       = 6
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

// AtServer stands in a hint for the --server that was typed, after a command that asks one.
const AtServer = "{server}"

// Failures have exit codes, if not exitFailure, and hints for what a server reports.
var Failures = map[codes.Code]struct {
	Exit int
	Hint string
}{
	codes.Unavailable:       {ExitConnection, ""},
	codes.Unauthenticated:   {ExitAuth, "--ca names the CA of the server's certificate; --token, or --cert and --key, identify you; for a server without TLS leave all of them out"},
	codes.PermissionDenied:  {ExitAuth, ""},
	codes.NotFound:          {0, "tensorferry ls" + AtServer + " lists the tensors and sources of a server, tensorferry models" + AtServer + " its models"},
	codes.AlreadyExists:     {0, "tensorferry push" + AtServer + " NAME=FILE stores a tensor under another name"},
	codes.DataLoss:          {ExitIntegrity, "try it again; if it stays so, the server's disk or the way there does damage: push the tensor anew"},
	codes.ResourceExhausted: {ExitLimit, "tensorferry info" + AtServer + " lists the server's limits"},
}

// saidHints are for what package identity says of a connection or a caller, and for full stores:
// the first that fits. Else failures has one.
var saidHints = []struct{ says, hint string }{
	{"delete some tensors", "tensorferry ls" + AtServer + " lists them, tensorferry rm" + AtServer + " deletes some"},
	{"has more room", "tensorferry serve --store memory:SIZE, or --store FOLDER"},
	{"the server's certificate: it is not signed by", "--ca names the file with the CA that has signed it"},
	{"the server's certificate: it is for", "--server-name says which of these names the server is to have"},
	{"the server's certificate: it expired", "its operator has to renew it"},
	{"the server does not speak TLS", "leave out --tls, --ca, --cert, --key and --token"},
	{"not enough disk space", "free some on the server's disk; tensorferry rm" + AtServer + " deletes tensors"},
	{"it names no host", "its operator has to make one with the host in subjectAltName"},
	{"a client certificate, or a token", "--token names the file with your token; or --cert and --key a certificate"},
	{"client certificate: it is not for this use", "--cert names one that is for clients (extendedKeyUsage clientAuth)"},
	{"client certificate: it expired", "--cert and --key name a new one"},
	{"client certificate", "--cert and --key name one that a CA of the server's has signed"},
	{"does not know the token", "--token names the file with it"},
	{"wants a token", "--token names the file with it"},
	{"the handshake: remote error: tls: certificate required", "--cert and --key identify you"},
}

// UsageError is a mistake in what was typed, or in the settings of serve.
type UsageError struct{ error }

func (e UsageError) Unwrap() error { return e.error }

// Usage returns a mistake in what was typed.
func Usage(format string, args ...any) error { return UsageError{fmt.Errorf(format, args...)} }

// hintedError is an error and what to do about it.
type hintedError struct {
	error
	hint string
}

func (h hintedError) Unwrap() error { return h.error }

// Hinted adds what to do about it to an error.
func Hinted(err error, hint string) error { return hintedError{err, hint} }

// AsUsage makes an error a mistake in what was typed.
func AsUsage(err error) error { return UsageError{err} }

// OfInput makes an error one in the bytes of an input, shown without that of the call it fails.
func OfInput(err error) error { return readError{err} }

// At makes an error one of the server of --to, and not of --server.
func At(err error, server string) error { return toError{err, server} }

// Mistake makes an error of what a setting names one of the setting, with the hint it has.
func Mistake(err error) error {
	if h := (hintedError{}); !errors.As(err, &h) {
		err = Hinted(err, "")
	}
	return UsageError{err}
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
	var u UsageError
	var x exitError
	var e *client.Error
	switch {
	case errors.As(err, &u):
		return ExitUsage
	case errors.As(err, &x): // also of what was interrupted
		return x.code
	case ctx.Err() != nil:
		return ExitInterrupted
	case errors.Is(err, client.ErrInput):
		return ExitFailure
	case errors.Is(err, client.ErrNoAnswer), errors.Is(err, client.ErrNotServer):
		return ExitConnection
	case errors.As(err, &e):
		return cmp.Or(Failures[status.Code(e)].Exit, ExitFailure)
	}
	return ExitFailure
}

// MostErrors is the most lines of an error: a thousand tensors may fail in a thousand ways.
const MostErrors = 10

// Packages begin their errors with their names, which people do not need.
var Packages = []string{
	"assembler", "bench", "blocks", "chunker", "client", "codec", "conns", "cpu", "cuda", "elements", "engine", "fashion", "fault", "frame", "generate", "glob", "identity", "inbound", "kernels", "lane", "lifecycle", "link", "relay", "retry", "server", "serving", "session", "slab",
	"stack", "store", "storing", "stream",
	"tensor", "tensorfile", "transfer", "wire", "worker",
}

// forPrograms matches names of packages and the gRPC code of a client's error, at the
// front or after what names a file or a server.
var forPrograms = func() *regexp.Regexp {
	var names []string
	for c := codes.Canceled; c <= codes.Unauthenticated; c++ {
		names = append(names, c.String())
	}
	return regexp.MustCompile(`(^|: )(?:(?:` + strings.Join(Packages, "|") + `): (?:(?:` + strings.Join(names, "|") + `): )?)+`)
}()

// sentences replace errors that are unclear without the name of their package.
var sentences = strings.NewReplacer(
	store.ErrFull.Error(), "the store is full",
	store.ErrClosed.Error(), "the store is closed",
	store.ErrUnavailable.Error(), "the store is unavailable",
	store.ErrNotFound.Error(), "not in the store",
	engine.ErrClosed.Error(), "the model is closed",
	engine.ErrUnavailable.Error(), "unavailable",
	tensor.ErrTooLarge.Error(), "the tensor is too large",
	client.ErrClosed.Error(), "the session is closed",
)

// joined are the errors that err joins. Texts are not split: a server could forge lines.
func joined(err error) []error {
	switch e := err.(type) { //nolint:errorlint // what it is itself, before what it wraps
	case interface{ Unwrap() error }:
		if inner := e.Unwrap(); inner != nil && inner.Error() == err.Error() {
			return joined(inner)
		}
	case interface{ Unwrap() []error }:
		if errors.Join(e.Unwrap()...).Error() == err.Error() {
			var all []error
			for _, inner := range e.Unwrap() {
				all = append(all, joined(inner)...)
			}
			return all
		}
	}
	return []error{err}
}

var oneLine = strings.NewReplacer("\r\n", " ", "\n", " ", "\r", " ")

// Text is an error as people read it: one line for each different one that it joins.
func Text(err error) string {
	var lines []string
	for _, e := range joined(err) {
		if r, ok := errors.AsType[readError](e); ok {
			e = r
		}
		line := oneLine.Replace(e.Error())
		line = display.Plain(forPrograms.ReplaceAllString(sentences.Replace(line), "$1"))
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
	Output bool   // --output was typed
}

// HintOf says what to do about an error of a command. Commands in it name its --server.
func HintOf(c Command, code int, err error) string {
	at, flag := "", "--server"
	if c.Server != "" {
		at = " --server " + display.Plain(c.Server)
	}
	to, atTo := errors.AsType[toError](err)
	if atTo {
		at, flag = " --server "+display.Plain(to.server), "--to"
	}
	var h hintedError
	var e *client.Error
	switch {
	case errors.As(err, &h):
	case errors.Is(err, client.ErrInputIdle):
		h.hint = "--input-idle sets how long input and output may be idle"
	case code == ExitUsage && !c.Verb:
		h.hint = "tensorferry help lists the commands"
	case code == ExitUsage:
		h.hint = "see " + c.Path + " --help for usage"
	case code == ExitConnection:
		h.hint = connectionHint(c, err, flag)
	case code != ExitInterrupted && errors.As(err, &e):
		h.hint = Failures[status.Code(e)].Hint
		for _, i := range saidHints {
			if strings.Contains(err.Error(), i.says) {
				h.hint = i.hint
				break
			}
		}
	}
	if atTo && code == ExitAuth {
		h.hint = strings.ReplaceAll(h.hint, "--", "--to-")
	}
	return strings.ReplaceAll(h.hint, AtServer, at)
}

// Hints for a server that is not one.
const (
	HintNoAnswer  = "something listens there and says nothing: a hung server, or not a tensorferry server"
	HintNotServer = "something answers there, but it is not a tensorferry server"
)

// connectionHint says what to do about the server of a flag, which is unavailable.
func connectionHint(c Command, err error, flag string) string {
	var e *client.Error
	switch {
	case errors.Is(err, client.ErrNoAnswer):
		return HintNoAnswer
	case errors.Is(err, client.ErrHostNotFound):
		return "name the server with " + flag + " host:port"
	case errors.Is(err, client.ErrNoConnection):
		return "is the server running? start one with tensorferry serve, or name it with " + flag + " host:port"
	case errors.Is(err, client.ErrNotServer):
		return HintNotServer
	case errors.Is(err, client.ErrDraining), errors.As(err, &e) && e.RetryAfter > 0:
		return "the server takes nothing now: try again later"
	}
	if c.Output {
		return "the connection broke; an output file is written whole or not at all, so run it again"
	}
	return "the connection broke; run it again"
}

// toError is an error of the server of --to, not of --server.
type toError struct {
	error
	server string
}

func (e toError) Error() string { return e.server + ": " + e.error.Error() }

func (e toError) Unwrap() error { return e.error }

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
