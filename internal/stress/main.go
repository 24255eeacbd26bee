// Command stress runs what a test of a few seconds cannot show: many sessions at once,
// servers and clients that are killed, hours of mixed load, and the programs of two
// commits together, always with a server process of its own, built from this module
// or from another commit. docs/stress.md says what each load shows.
//
// It measures no speed, but has commands do so in turns. It is a program and has no importers;
// the tensors it sends are windows of memory that nobody writes to.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/tensorferry/tensorferry/internal/bench"
)

// programs are what can be run.
var programs = []struct {
	name, what string
	run        func(context.Context, *environment, []string) error
}{
	{"sessions", "a thousand sessions with a call each in flight, ten thousand idle ones", runSessions},
	{"crash", "servers killed while tensors are pushed, clients killed while they pull", runCrash},
	{"receive", "peers that make a server hold what they send, or leave unread what it sends", runReceive},
	{"soak", "mixed load on two servers, and whether anything grows", runSoak},
	{"old-new", "clients and servers of an older commit with those of this one", runOldNew},
}

// errFailed is what a program ends with that did not show what it should.
var errFailed = errors.New("stress: it did not show what it should")

// environment is what every program has.
type environment struct {
	*problems
	out     io.Writer
	name    string // of the program: old or new
	dir     string // for folders and sockets; removed at the end
	source  string // the module's folder; empty is the working folder
	command string // the tensorferry binary
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Stdout, os.Args[1:])
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer, args []string) (err error) {
	if len(args) > 0 {
		for _, p := range programs {
			if p.name != args[0] {
				continue
			}
			dir, err := os.MkdirTemp("", "tensorferry-stress-")
			if err != nil {
				return err
			}
			defer func() { _ = os.RemoveAll(dir) }()
			return p.run(ctx, &environment{problems: new(problems), out: out, name: "new", dir: dir}, args[1:])
		}
	}
	var list strings.Builder
	for _, p := range programs {
		fmt.Fprintf(&list, "\n  %-9s %s", p.name, p.what)
	}
	return fmt.Errorf("stress: say which program, and -h for its flags:%s", &list)
}

// flags returns a program's flags, with those that every program has.
func (e *environment) flags(name string) *flag.FlagSet {
	f := flag.NewFlagSet(name, flag.ContinueOnError)
	f.SetOutput(e.out)
	f.StringVar(&e.command, "command", "", "tensorferry `binary` (default: built from this module)")
	return f
}

// ready reads the flags and builds what they did not name.
func (e *environment) ready(ctx context.Context, f *flag.FlagSet, args []string) error {
	if err := f.Parse(args); err != nil {
		return err
	}
	if f.NArg() > 0 {
		return fmt.Errorf("stress: %s takes no argument %q", f.Name(), f.Arg(0))
	}
	fmt.Fprintln(e.out, bench.ThisMachine())
	return e.build(ctx)
}

// verdict prints how a program ended, which an error ends, too.
func (e *environment) verdict(ctx context.Context, name string, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		e.add("%v", err)
	}
	word := "PASS"
	for _, p := range e.all() {
		fmt.Fprintf(e.out, "%s: problem: %s\n", name, p)
		word, err = "FAIL", errFailed
	}
	fmt.Fprintf(e.out, "%s: %s\n", name, word)
	return err
}
