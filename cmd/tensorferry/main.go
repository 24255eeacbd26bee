// Command tensorferry serves models, runs them over files and pipes, shows a
// split network at work, and measures itself. It is where engines are picked and
// packages wired together; it holds no logic that a library user would miss.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/client"
)

// version ends in -dev between releases.
const version = "0.1.0-dev"

// Exit codes, for scripts. Code 1 is any failure without a code of its own.
const (
	exitFailure     = 1
	exitUsage       = 2
	exitConnection  = 3
	exitAuth        = 4
	exitIntegrity   = 5
	exitLimit       = 6
	exitInterrupted = 7
)

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
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	os.Exit(run(ctx, os.Args[1:]))
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
	fmt.Fprintf(os.Stderr, "tensorferry: %v\n", err)
	var h hinted
	switch {
	case errors.As(err, &h):
		fmt.Fprintf(os.Stderr, "hint: %s\n", h.hint)
	case code == exitUsage:
		fmt.Fprintln(os.Stderr, "hint: tensorferry help lists the commands, tensorferry COMMAND --help its flags")
	case code == exitConnection:
		fmt.Fprintf(os.Stderr, "hint: %s\n", connectionHint(err))
	}
	return code
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
	root.CompletionOptions.HiddenDefaultCmd = true
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(serveCommand(), runCommand(), demoCommand(), benchCommand(), modelsCommand(), infoCommand(), versionCommand())
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

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "print the version", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(c.OutOrStdout(), version)
			return err
		},
	}
}

// exitCode is the table of how a command ends.
func exitCode(ctx context.Context, err error) int {
	var u usageError
	switch {
	case errors.As(err, &u):
		return exitUsage
	case ctx.Err() != nil:
		return exitInterrupted
	case errors.Is(err, client.ErrInput):
		return exitFailure
	}
	var e *client.Error
	if !errors.As(err, &e) {
		if text := err.Error(); len(text) > 15 && text[:15] == "unknown command" { // cobra has no type for it
			return exitUsage
		}
		return exitFailure
	}
	switch status.Code(e) {
	case codes.Unavailable:
		return exitConnection
	case codes.Unauthenticated, codes.PermissionDenied:
		return exitAuth
	case codes.DataLoss:
		return exitIntegrity
	case codes.ResourceExhausted:
		return exitLimit
	case codes.Canceled:
		return exitFailure
	}
	return exitFailure
}
