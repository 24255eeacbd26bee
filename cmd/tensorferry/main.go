// Command tensorferry serves models, runs them over files and pipes, shows a
// split network at work, and measures itself. It is where engines are picked and
// packages wired together; it holds no logic that a library user would miss.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
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
	codes.ResourceExhausted: "tensorferry info lists the server's limits, tensorferry rm makes room in its store",
}

// gcPercent lets the Go heap grow to 16 MB before the first collection.
const gcPercent = 400

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
	if os.Getenv("GOGC") == "" {
		// Payload lies outside the Go heap, which holds a few MB of bookkeeping:
		// collecting it for every further 4 MB would cost more than it frees.
		debug.SetGCPercent(gcPercent)
	}
	os.Exit(run(untilInterrupted(), os.Args[1:]))
}

func run(ctx context.Context, args []string) int {
	root := command()
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	code := exitCode(ctx, err)
	if code == exitInterrupted {
		err = errors.New("interrupted") // what it broke is not news
	}
	fmt.Fprintf(os.Stderr, "tensorferry: %s\n", said(err))
	if hint := hintOf(code, err); hint != "" {
		fmt.Fprintf(os.Stderr, "hint: %s\n", hint)
	}
	return code
}

// mostErrors is how many lines an error has at most: a push of a thousand tensors
// may fail in a thousand ways.
const mostErrors = 10

// forPrograms is what a client's errors begin with, and the exit code and the hint
// say to people.
var forPrograms = regexp.MustCompile(`^client: (?:[A-Z][A-Za-z]+: )?`)

// grpcWords is how grpc says that a connection was not to be had.
var grpcWords = regexp.MustCompile(`connection error: desc = "transport: Error while dialing: (.*)"$`)

// cutShort is how a client says that a reader failed in the end, because more came.
var cutShort = regexp.MustCompile(`bad input: (?:input|tensor) ".*" ended after \d+ of \d+ bytes: (.* goes on after the bytes of )`)

// said is an error as people read it: a line for each that it joins, once.
func said(err error) string {
	var lines []string
	more := 0
	for line := range strings.SplitSeq(err.Error(), "\n") {
		line = forPrograms.ReplaceAllString(line, "")
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

// hintOf says what to do about an error, if that is not plain.
func hintOf(code int, err error) string {
	var h hinted
	var e *client.Error
	switch {
	case errors.As(err, &h):
		return h.hint
	case code == exitUsage:
		return "tensorferry help lists the commands, tensorferry COMMAND --help its flags"
	case code == exitConnection:
		return connectionHint(err)
	case code != exitInterrupted && errors.As(err, &e):
		return hints[status.Code(e)]
	}
	return ""
}

// connectionHint says what to do about a server that is unavailable. grpc tells
// only in words how far it came.
func connectionHint(err error) string {
	var e *client.Error
	switch text := err.Error(); {
	case strings.Contains(text, "while dialing"), strings.Contains(text, "name resolver"):
		return "is the server running? start one with tensorferry serve, or name it with --server host:port"
	case strings.Contains(text, "server preface"):
		return "something answers there, but it is no tensorferry server"
	case errors.Is(err, client.ErrDraining), errors.As(err, &e) && e.RetryAfter > 0:
		return "the server takes nothing now: try again later"
	}
	return "the connection broke; an output file is written whole or not at all, so run it again"
}

func command() *cobra.Command {
	root := &cobra.Command{
		Use:           "tensorferry",
		Short:         "carry tensors between programs and through models",
		Version:       version,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
		RunE:          func(c *cobra.Command, _ []string) error { return c.Help() },
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
	for _, c := range root.Commands() {
		c.Args = typed(c.Args)
	}
	return root
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
	case errors.As(err, &e):
		return cmp.Or(exitOf[status.Code(e)], exitFailure)
	}
	// Two mistakes that cobra has no type for.
	if text := err.Error(); strings.HasPrefix(text, "unknown command") || strings.HasPrefix(text, "required flag") {
		return exitUsage
	}
	return exitFailure
}
