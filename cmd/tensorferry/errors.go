package main

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

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

// Exit codes, for scripts.
const (
	exitFailure     = 1
	exitUsage       = 2
	exitConnection  = 3
	exitAuth        = 4
	exitIntegrity   = 5
	exitLimit       = 6
	exitInterrupted = 7
	exitDevice      = 8
	exitSettings    = 78 // sysexits.h: EX_CONFIG. A crash of Go has exitUsage
)

var exits = map[int]string{
	0:               "all is done",
	exitFailure:     "any failure without a code of its own, or a difference that diff found",
	exitUsage:       "a mistake in what was typed",
	exitConnection:  "no connection to the server, or it takes nothing now",
	exitAuth:        "the server does not know or does not allow the caller",
	exitIntegrity:   "bytes arrived damaged, or not those that were sent",
	exitLimit:       "over a limit or a budget of the server",
	exitInterrupted: "interrupted; to be run again",
	exitDevice:      "serve --exit-on-device-loss lost a device",
	exitSettings:    "a mistake in the settings of serve, which a restart does not mend",
}

// atServer stands in a hint for the --server that was typed, after a command that asks one.
const atServer = "{server}"

// failures have exit codes, if not exitFailure, and hints for what a server reports.
var failures = map[codes.Code]struct {
	exit int
	hint string
}{
	codes.Unavailable:       {exitConnection, ""},
	codes.Unauthenticated:   {exitAuth, "--ca names the CA of the server's certificate; --token, or --cert and --key, identify you; for a server without TLS leave all of them out"},
	codes.PermissionDenied:  {exitAuth, ""},
	codes.NotFound:          {0, "tensorferry ls" + atServer + " lists the tensors and sources of a server, tensorferry models" + atServer + " its models"},
	codes.AlreadyExists:     {0, "tensorferry push" + atServer + " NAME=FILE stores a tensor under another name"},
	codes.DataLoss:          {exitIntegrity, "try it again; if it stays so, the server's disk or the way there does damage: push the tensor anew"},
	codes.ResourceExhausted: {exitLimit, "tensorferry info" + atServer + " lists the server's limits"},
}

// saidHints are for what package identity says of a connection or a caller, and for full stores:
// the first that fits. Else failures has one.
var saidHints = []struct{ says, hint string }{
	{"delete some tensors", "tensorferry ls" + atServer + " lists them, tensorferry rm" + atServer + " deletes some"},
	{"has more room", "tensorferry serve --store memory:SIZE, or --store FOLDER"},
	{"the server's certificate: it is not signed by", "--ca names the file with the CA that has signed it"},
	{"the server's certificate: it is for", "--server-name says which of these names the server is to have"},
	{"the server's certificate: it expired", "its operator has to renew it"},
	{"the server does not speak TLS", "leave out --tls, --ca, --cert, --key and --token"},
	{"not enough disk space", "free some on the server's disk; tensorferry rm" + atServer + " deletes tensors"},
	{"it names no host", "its operator has to make one with the host in subjectAltName"},
	{"a client certificate, or a token", "--token names the file with your token; or --cert and --key a certificate"},
	{"client certificate: it is not for this use", "--cert names one that is for clients (extendedKeyUsage clientAuth)"},
	{"client certificate: it expired", "--cert and --key name a new one"},
	{"client certificate", "--cert and --key name one that a CA of the server's has signed"},
	{"does not know the token", "--token names the file with it"},
	{"wants a token", "--token names the file with it"},
	{"the handshake: remote error: tls: certificate required", "--cert and --key identify you"},
}

// usageError is a mistake in what was typed, or in the settings of serve.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func usage(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// hinted is an error and what to do about it.
type hinted struct {
	error
	hint string
}

func (h hinted) Unwrap() error { return h.error }

// mistake makes an error of what a setting names one of the setting, with the hint it has.
func mistake(err error) error {
	if h := (hinted{}); !errors.As(err, &h) {
		err = hinted{err, ""}
	}
	return usageError{err}
}

// lasting makes an error a mistake if it says of a path what stays so until somebody changes it.
func lasting(err error) error {
	for _, is := range []error{fs.ErrNotExist, fs.ErrPermission, syscall.ENOTDIR, syscall.EROFS} {
		if errors.Is(err, is) {
			return mistake(err)
		}
	}
	return err
}

func exitCode(ctx context.Context, err error) int {
	var u usageError
	var e *client.Error
	switch {
	case errors.As(err, &u):
		return exitUsage
	case errors.Is(err, errDeviceLost):
		return exitDevice
	case errors.Is(err, errCut): // it was interrupted, and that is not what failed
		return exitFailure
	case ctx.Err() != nil:
		return exitInterrupted
	case errors.Is(err, client.ErrInput):
		return exitFailure
	case errors.Is(err, client.ErrNoAnswer), errors.Is(err, client.ErrNotServer):
		return exitConnection
	case errors.As(err, &e):
		return cmp.Or(failures[status.Code(e)].exit, exitFailure)
	}
	return exitFailure
}

// mostErrors is the most lines of an error: a thousand tensors may fail in a thousand ways.
const mostErrors = 10

// packages begin their errors with their names, which people do not need.
var packages = []string{
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
	return regexp.MustCompile(`(^|: )(?:(?:` + strings.Join(packages, "|") + `): (?:(?:` + strings.Join(names, "|") + `): )?)+`)
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

// said is an error as people read it: one line for each different one that it joins.
func said(err error) string {
	var lines []string
	for _, e := range joined(err) {
		if r, ok := errors.AsType[readError](e); ok {
			e = r
		}
		line := oneLine.Replace(e.Error())
		line = plain(forPrograms.ReplaceAllString(sentences.Replace(line), "$1"))
		if !slices.Contains(lines, line) {
			lines = append(lines, line)
		}
	}
	if more := len(lines) - mostErrors; more > 0 {
		lines = append(lines[:mostErrors], fmt.Sprintf("and %d more", more))
	}
	return strings.Join(lines, "\n")
}

// hintOf says what to do about an error of a command. Commands in it name its --server.
func hintOf(c *cobra.Command, code int, err error) string {
	at, flag := "", "--server"
	if f := c.Flag("server"); f != nil && f.Changed {
		at = " --server " + plain(f.Value.String())
	}
	to, atTo := errors.AsType[toError](err)
	if atTo {
		at, flag = " --server "+plain(to.server), "--to"
	}
	var h hinted
	var e *client.Error
	switch {
	case errors.As(err, &h):
	case errors.Is(err, client.ErrInputIdle):
		h.hint = "--input-idle sets how long input and output may be idle"
	case code == exitUsage && !c.HasParent():
		h.hint = "tensorferry help lists the commands"
	case code == exitUsage:
		h.hint = "see " + c.CommandPath() + " --help for usage"
	case code == exitConnection:
		h.hint = connectionHint(c, err, flag)
	case code != exitInterrupted && errors.As(err, &e):
		h.hint = failures[status.Code(e)].hint
		for _, i := range saidHints {
			if strings.Contains(err.Error(), i.says) {
				h.hint = i.hint
				break
			}
		}
	}
	if atTo && code == exitAuth {
		h.hint = strings.ReplaceAll(h.hint, "--", "--to-")
	}
	return strings.ReplaceAll(h.hint, atServer, at)
}

// Hints for a server that is not one.
const (
	hintNoAnswer  = "something listens there and says nothing: a hung server, or not a tensorferry server"
	hintNotServer = "something answers there, but it is not a tensorferry server"
)

// connectionHint says what to do about the server of a flag, which is unavailable.
func connectionHint(c *cobra.Command, err error, flag string) string {
	var e *client.Error
	switch {
	case errors.Is(err, client.ErrNoAnswer):
		return hintNoAnswer
	case errors.Is(err, client.ErrHostNotFound):
		return "name the server with " + flag + " host:port"
	case errors.Is(err, client.ErrNoConnection):
		return "is the server running? start one with tensorferry serve, or name it with " + flag + " host:port"
	case errors.Is(err, client.ErrNotServer):
		return hintNotServer
	case errors.Is(err, client.ErrDraining), errors.As(err, &e) && e.RetryAfter > 0:
		return "the server takes nothing now: try again later"
	}
	if f := c.Flag("output"); f != nil && f.Changed {
		return "the connection broke; an output file is written whole or not at all, so run it again"
	}
	return "the connection broke; run it again"
}
