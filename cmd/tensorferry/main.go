// Command tensorferry serves models, runs them on files and pipes, stores and compares
// tensors, and measures performance. It chooses engines and connects packages; it contains
// no logic that users of the library would need.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/bench/kinds"
)

// ballast is the minimum growth of the Go heap between two collections. The heap holds no
// payload, only a few MB of bookkeeping, which are not worth a collection every 4 MB. A
// larger GOGC would do the same for a small heap, but would also let a large one grow.
const ballast = 16 << 20

func main() {
	never := make([]byte, ballast) // never touched, so not in memory
	bench.BeEnd(kinds.All())       // exits if the bench command has started this process
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
		err = errors.New("interrupted") // which caused err
	}
	text, hint := said(err), hintOf(c, code, err)
	if code == exitUsage && (c.Name() == "serve" || c.Name() == "link") {
		code = exitSettings
	}
	if c.Name() == "serve" { // nobody may read what it says
		defer time.AfterFunc(lastWords, func() { os.Exit(code) }).Stop()
	}
	if f := c.Flag("log-format"); f != nil && f.Value.String() == logJSON { // of serve, whose log goes on
		attrs := []any{slog.String("error", text)}
		if hint != "" {
			attrs = append(attrs, slog.String("hint", hint))
		}
		slog.New(slog.NewJSONHandler(os.Stderr, nil)).Error("failed", append(attrs, slog.Int("exit_code", code))...)
		return code
	}
	fmt.Fprintf(os.Stderr, "tensorferry: %s\n", text)
	if hint != "" {
		fmt.Fprintf(os.Stderr, "hint: %s\n", hint)
	}
	return code
}

func command() *cobra.Command {
	root := &cobra.Command{
		Use:                        "tensorferry",
		Short:                      "carry tensors between programs and through models",
		Version:                    version,
		SilenceUsage:               true,
		SuggestionsMinimumDistance: 2,
		SilenceErrors:              true,
		Args:                       noCommand,
		RunE:                       func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetFlagErrorFunc(flagError)
	root.AddCommand(
		serveCommand(), demoCommand(), benchCommand(), // start servers
		runCommand(), modelsCommand(), infoCommand(), // use a server
		pushCommand(), pullCommand(), lsCommand(), rmCommand(), cpCommand(), verifyCommand(), // use its store
		genCommand(), showCommand(), diffCommand(), certCommand(), // files
		versionCommand(), linkCommand(),
	)
	helpCommand(root)
	return root
}

// helpCommand rejects topics that are not commands, for which cobra would list commands.
func helpCommand(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	help, _, err := root.Find([]string{"help"})
	if err != nil {
		panic(err) // InitDefaultHelpCmd has added it
	}
	help.Short = "show the help of a command"
	help.Args = func(_ *cobra.Command, args []string) error {
		_, rest, err := root.Find(args)
		if err != nil {
			return usageError{err}
		}
		return noCommand(root, rest)
	}
}

// noCommand rejects arguments, which are not the name of a command.
func noCommand(root *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	err := fmt.Errorf("unknown command %q", args[0])
	if like := root.SuggestionsFor(args[0]); len(like) > 0 {
		err = hinted{err, "did you mean " + nearest(args[0], like) + "? tensorferry help lists the commands"}
	}
	return usageError{err}
}

const many = math.MaxInt // as the limit of takes: none

// takes checks that a command has an argument for each of needs, and no more than most.
func takes(most int, needs ...string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		switch {
		case len(args) < len(needs):
			return usage("missing %s; usage: %s", strings.Join(needs[len(args):], " and "), c.UseLine())
		case len(args) > most && most == 0:
			return usage("%s takes no arguments, not %q", c.CommandPath(), args[0])
		case len(args) > most:
			return usage("unexpected argument %q; usage: %s", args[most], c.UseLine())
		}
		return nil
	}
}

// oneOrder is how long further signals count as part of the first: GNU timeout signals its
// child and then its group, and so may a terminal and a parent.
const oneOrder = 500 * time.Millisecond

// untilInterrupted returns a context that ends at the first signal. At the second, the
// process exits. It starts a goroutine that ends with the process.
func untilInterrupted() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 2) // both may arrive before either is read
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // by nohup
		signal.Notify(signals, syscall.SIGHUP)
	}
	go func() {
		obey(signals, cancel)
		time.AfterFunc(lastWords, func() { os.Exit(exitInterrupted) }) // nobody may read this:
		fmt.Fprintln(os.Stderr, "tensorferry: second signal: exiting immediately")
		os.Exit(exitInterrupted)
	}()
	return ctx
}

// onHangup is what SIGHUP does instead of stopping the process: in a server without a terminal,
// which cannot hang up.
var onHangup atomic.Pointer[func()]

// obey calls stop at the first signal and returns at the second.
func obey(signals <-chan os.Signal, stop func()) {
	var told time.Time
	for s := range signals {
		switch f := onHangup.Load(); {
		case s == syscall.SIGHUP && f != nil:
			go (*f)() // ends when it has read some files, for which no other signal waits
		case told.IsZero():
			told = time.Now()
			stop()
		case time.Since(told) >= oneOrder:
			return
		}
	}
}

// hasTerminal reports whether a terminal controls this process.
func hasTerminal() bool {
	f, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
	_ = f.Close() // of none is an error
	return err == nil
}

// version ends in -dev between releases.
const version = "0.1.0-dev"

type versionJSON struct {
	Version string `json:"version"`
	// Commit is that of the build, if it was recorded, and + if the tree had changes.
	Commit   string `json:"commit,omitempty"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

func versionCommand() *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use: "version", Short: "print the version", Args: takes(0),
		Long: `Version prints the version. With --json, it also prints the commit, the Go version and
the platform of the build.`,
		RunE: func(c *cobra.Command, _ []string) error {
			v := versionJSON{Version: version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
			if info, ok := debug.ReadBuildInfo(); ok {
				for _, s := range info.Settings {
					switch {
					case s.Key == "vcs.revision":
						v.Commit = s.Value + v.Commit
					case s.Key == "vcs.modified" && s.Value == "true":
						v.Commit += "+"
					}
				}
			}
			return printer{c.OutOrStdout(), asJSON}.print(v, func(w io.Writer) { fmt.Fprintln(w, version) })
		},
	}
	jsonFlag(c, &asJSON)
	return c
}
