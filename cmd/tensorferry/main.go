// Command tensorferry serves models, runs them over files and pipes, shows a
// split network at work, and measures itself. It is where engines are picked and
// packages wired together; it holds no logic that a library user would miss.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strings"

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
)

// exits say what each code means.
var exits = []struct {
	code  int
	means string
}{
	{0, "all is done"},
	{exitFailure, "any failure without a code of its own"},
	{exitUsage, "a mistake in what was typed"},
	{exitConnection, "no connection to the server, or it takes nothing now"},
	{exitAuth, "the server does not know or does not allow the caller"},
	{exitIntegrity, "bytes arrived damaged, or not those that were sent"},
	{exitLimit, "over a limit or a budget of the server"},
	{exitInterrupted, "interrupted; to be run again"},
}

// exitOf has the codes of failures that a server, or the way to it, tells of.
var exitOf = map[codes.Code]int{
	codes.Unavailable:       exitConnection,
	codes.Unauthenticated:   exitAuth,
	codes.PermissionDenied:  exitAuth,
	codes.DataLoss:          exitIntegrity,
	codes.ResourceExhausted: exitLimit,
}

// hints say what to do about failures that a server tells of.
var hints = map[codes.Code]string{
	codes.NotFound:          "tensorferry ls lists the tensors and sources of a server, tensorferry models its models",
	codes.AlreadyExists:     "tensorferry push NAME=FILE stores a tensor under another name",
	codes.DataLoss:          "try it again; if it stays so, the server's disk or the way there does damage: push the tensor anew",
	codes.ResourceExhausted: "tensorferry info lists the server's limits",
}

// ballast is how much the Go heap grows at least from one collection to the next.
// Payload lies outside of it; what it holds is a few MB of bookkeeping, and to collect
// that for every further 4 MB would cost more than it frees. A larger percentage
// (GOGC) would do as much for a small heap, and let a large one grow with it.
const ballast = 16 << 20

// usageError is a mistake in what was typed.
type usageError struct{ err error }

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

func usage(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// hinted is an error and what to do about it.
type hinted struct {
	error
	hint string
}

func (h hinted) Unwrap() error { return h.error }

func main() {
	never := make([]byte, ballast) // touched, so none of it is in memory
	code := run(untilInterrupted(), os.Args[1:])
	runtime.KeepAlive(never)
	os.Exit(code)
}

func run(ctx context.Context, args []string) int {
	root := command()
	root.SetArgs(args)
	c, err := root.ExecuteContextC(ctx)
	if err == nil {
		return 0
	}
	code := exitCode(ctx, err)
	if code == exitInterrupted {
		err = errors.New("interrupted") // what it broke is not news
	}
	text := strings.ReplaceAll(said(err), noHost, "host not found: "+servers(c))
	fmt.Fprintf(os.Stderr, "tensorferry: %s\n", text)
	if hint := hintOf(c, code, err); hint != "" {
		fmt.Fprintf(os.Stderr, "hint: %s\n", hint)
	}
	return code
}

// mostErrors is how many lines an error has at most: a push of a thousand tensors
// may fail in a thousand ways.
const mostErrors = 10

// packages begin their errors with their names, which are for programmers.
var packages = []string{
	"assembler", "bench", "blocks", "chunker", "client", "codec", "cpu", "engine", "fashion", "fault", "frame", "server", "session", "serving", "slab", "stack", "store", "stream",
	"summary", "tensor", "tensorfile", "transfer", "wire",
}

// forPrograms are such names, at the front or behind what names a file or a server,
// and the code behind a client's, which the exit code and the hint say to people.
var forPrograms = regexp.MustCompile(`(^|: )(?:(?:` + strings.Join(packages, "|") + `): (?:(?:` + codeNames() + `): )?)+`)

// codeNames are the codes as a client's error names them.
func codeNames() string {
	var names []string
	for c := codes.Canceled; c <= codes.Unauthenticated; c++ {
		names = append(names, c.String())
	}
	return strings.Join(names, "|")
}

// sentences say what an error is of that says no more without its package's name.
var sentences = strings.NewReplacer(
	store.ErrFull.Error(), "the store is full",
	store.ErrClosed.Error(), "the store is closed",
	store.ErrUnavailable.Error(), "the store is unavailable",
	store.ErrNotFound.Error(), "not in the store",
	engine.ErrClosed.Error(), "the model is closed",
	engine.ErrUnavailable.Error(), "the model is unavailable",
	tensor.ErrTooLarge.Error(), "the tensor is too large",
	client.ErrClosed.Error(), "the session is closed",
)

// grpcWords is how grpc says that a connection was not to be had.
var grpcWords = regexp.MustCompile(`connection error: desc = "transport: Error while dialing: (.*)"$`)

// cutShort is how a client says that a reader failed, which says itself of what it had
// too much or too little.
var cutShort = regexp.MustCompile(`bad input: (?:input|tensor) ".*" ended after \d+ of \d+ bytes: (.* (?:goes on after the bytes of|ended after \d+ of) )`)

// joined are the errors that err joins, or err itself. Newlines in a text part nothing:
// they may be a server's, which is not to write lines of its own.
func joined(err error) []error {
	switch e := err.(type) { //nolint:errorlint // what it is itself, before what it wraps
	case interface{ Unwrap() error }:
		if inner := e.Unwrap(); inner != nil && inner.Error() == err.Error() {
			return joined(inner)
		}
	case interface{ Unwrap() []error }:
		var all []error
		var texts []string
		for _, inner := range e.Unwrap() {
			all = append(all, joined(inner)...)
			texts = append(texts, inner.Error())
		}
		if strings.Join(texts, "\n") == err.Error() {
			return all
		}
	}
	return []error{err}
}

// oneLine makes a line of several.
var oneLine = strings.NewReplacer("\r\n", " ", "\n", " ", "\r", " ")

// said is an error as people read it: a line for each that it joins, once.
func said(err error) string {
	var lines []string
	more := 0
	for _, e := range joined(err) {
		line := oneLine.Replace(e.Error())
		line = forPrograms.ReplaceAllString(sentences.Replace(line), "$1")
		line = cutShort.ReplaceAllString(line, "$1")
		line = plain(grpcWords.ReplaceAllString(line, "no connection: $1"))
		switch {
		case slices.Contains(lines, line):
		case len(lines) < mostErrors:
			lines = append(lines, line)
		default:
			more++
		}
	}
	if more > 0 {
		lines = append(lines, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(lines, "\n")
}

// noHost is how grpc says that nobody knows a host; it does not say which.
const noHost = "name resolver error: produced zero addresses"

// servers are the addresses that a command was given.
func servers(c *cobra.Command) string {
	var list []string
	for _, name := range []string{"server", "to"} {
		if f := c.Flag(name); f != nil && f.Value.String() != "" {
			list = append(list, plain(f.Value.String()))
		}
	}
	return strings.Join(list, " or ")
}

// askers are the commands in hints that talk to a server.
var askers = regexp.MustCompile(`tensorferry (?:ls|models|info|rm|push)\b`)

// hintOf says what to do about an error of a command, if that is not plain.
func hintOf(c *cobra.Command, code int, err error) string {
	hint := hintFor(c, code, err)
	if f := c.Flag("server"); f != nil && f.Changed && code != exitUsage { // the server meant is that one
		hint = askers.ReplaceAllStringFunc(hint, func(asker string) string { return asker + " --server " + plain(f.Value.String()) })
	}
	return hint
}

func hintFor(c *cobra.Command, code int, err error) string {
	var h hinted
	var e *client.Error
	switch {
	case errors.As(err, &h):
		return h.hint
	case code == exitUsage && !c.HasParent():
		return "tensorferry help lists the commands"
	case code == exitUsage:
		return c.CommandPath() + " --help says how it is used"
	case code == exitConnection:
		return connectionHint(c, err)
	case code == exitLimit && fullMemory.MatchString(err.Error()):
		return "a larger --store memory:SIZE of the server has more room, a folder has the disk's"
	case code == exitLimit && strings.Contains(err.Error(), store.ErrFull.Error()):
		return "tensorferry rm makes room in the store, tensorferry info lists the server's limits"
	case code != exitInterrupted && errors.As(err, &e):
		return hints[status.Code(e)]
	}
	return ""
}

// fullMemory is how a store in memory says that it is full, also without the tensors
// that it can forget: to remove those makes no room.
var fullMemory = regexp.MustCompile(regexp.QuoteMeta(store.ErrFull.Error()) + `: .* the limit is \d+`)

// connectionHint says what to do about a server that is unavailable. grpc tells
// only in words how far it came.
func connectionHint(c *cobra.Command, err error) string {
	var e *client.Error
	flag := "--server"
	if _, atTo := errors.AsType[toError](err); atTo {
		flag = "--to"
	}
	switch text := err.Error(); {
	case errors.Is(err, client.ErrNoAnswer):
		return "something listens there and says nothing: a server that hangs, or none of tensorferry's"
	case strings.Contains(text, noHost):
		return "name the server with " + flag + " host:port"
	case strings.Contains(text, "while dialing"), strings.Contains(text, "name resolver"):
		return "is the server running? start one with tensorferry serve, or name it with " + flag + " host:port"
	case strings.Contains(text, "server preface"):
		return "something answers there, but it is no tensorferry server"
	case errors.Is(err, client.ErrDraining), errors.As(err, &e) && e.RetryAfter > 0:
		return "the server takes nothing now: try again later"
	}
	if f := c.Flag("output"); f != nil && f.Changed {
		return "the connection broke; an output file is written whole or not at all, so run it again"
	}
	return "the connection broke; run it again"
}

func command() *cobra.Command {
	root := &cobra.Command{
		Use:          "tensorferry",
		Short:        "carry tensors between programs and through models",
		Version:      version,
		SilenceUsage: true,
		// Letters that a mistyped command differs in from the one that is suggested.
		SuggestionsMinimumDistance: 2,
		SilenceErrors:              true,
		Args:                       noCommand,
		RunE:                       func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	root.SetVersionTemplate("{{.Version}}\n")
	root.CompletionOptions.DisableDefaultCmd = true // completionCommand is in its place
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(
		serveCommand(), demoCommand(), benchCommand(), // servers
		runCommand(), modelsCommand(), infoCommand(), // at a server
		pushCommand(), pullCommand(), lsCommand(), rmCommand(), cpCommand(), // its store
		genCommand(), showCommand(), // files
		versionCommand(), completionCommand(),
	)
	helpCommand(root)
	return root
}

// helpCommand makes a mistake of help for what is no command; cobra would print what
// there is, and be content.
func helpCommand(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	help, _, err := root.Find([]string{"help"})
	if err != nil {
		panic(err) // it was made in the line above
	}
	help.Short = "show what a command does"
	help.Args = func(_ *cobra.Command, args []string) error {
		_, rest, err := root.Find(args)
		if err != nil {
			return usageError{err}
		}
		return noCommand(root, rest)
	}
}

// noCommand is for a word that no command has taken.
func noCommand(root *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	err := fmt.Errorf("unknown command %q", args[0])
	if like := root.SuggestionsFor(args[0]); len(like) > 0 {
		err = hinted{err, "did you mean " + strings.Join(like, " or ") + "? tensorferry help lists the commands"}
	}
	return usageError{err}
}

// many is more arguments than anybody types.
const many = math.MaxInt

// takes checks that a command has an argument for each of what it needs, and at most
// so many.
func takes(most int, needs ...string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		switch {
		case len(args) < len(needs):
			return usage("missing: %s, as in %s", strings.Join(needs[len(args):], " and "), c.UseLine())
		case len(args) > most && most == 0:
			return usage("%s takes no arguments, not %q", c.CommandPath(), args[0])
		case len(args) > most:
			return usage("one argument too many, %q: %s", args[most], c.UseLine())
		}
		return nil
	}
}

// typed makes an error about a command's arguments a usage error.
func typed(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if err := check(c, args); err != nil {
			return usageError{err}
		}
		return nil
	}
}

// exitCode says how a command ends that failed.
func exitCode(ctx context.Context, err error) int {
	var u usageError
	var e *client.Error
	switch {
	case errors.As(err, &u):
		return exitUsage
	case errors.Is(err, errCut): // it was interrupted, and that is not what failed
		return exitFailure
	case ctx.Err() != nil:
		return exitInterrupted
	case errors.Is(err, client.ErrInput):
		return exitFailure
	case errors.Is(err, client.ErrNoAnswer):
		return exitConnection
	case errors.As(err, &e):
		return cmp.Or(exitOf[status.Code(e)], exitFailure)
	}
	// A mistake that cobra has no type for.
	if strings.HasPrefix(err.Error(), "required flag") {
		return exitUsage
	}
	return exitFailure
}
