// Command stress runs what a test of a few seconds cannot show: many sessions at once,
// servers and clients that are killed, and hours of mixed load, always with a server
// process of its own. docs/stress.md says what each load shows.
//
// It measures no speed: that is the module bench. It is a program and has no importers;
// the tensors it sends are windows of memory that nobody writes to.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/internal/harness"
)

// programs are what can be run.
var programs = []struct {
	name, what string
	run        func(context.Context, *environment) error
}{
	{"sessions", "a thousand sessions with a call each in flight, ten thousand idle ones", runSessions},
	{"crash", "servers killed while tensors and sets are pushed, clients killed while they push a set or pull", runCrash},
	{"receive", "peers that make a server hold what they send, or leave unread what it sends", runReceive},
	{"restarts", "a server that is ended and started again, under clients that repeat what fails", runRestarts},
	{"soak", "mixed load on two servers, and whether anything grows", runSoak},
}

// others are what this program starts itself as, with two arguments.
var others = map[string]func(ctx context.Context, a, b string) error{"attack": attackServer, "serve": serveCounted}

// environment is what every program has.
type environment struct {
	problems
	out      io.Writer
	dir      string // for folders and sockets; removed at the end
	expected string // what a server may complain about

	// The flags, which every program has, too.
	command            string
	calls, idle, kills int
	rest, lasts        time.Duration
	seed               uint64
	folder             string
	only, tls          string
	clients            int
}

// flags declares the flags; each says whose it is.
func (e *environment) flags(f *flag.FlagSet) {
	f.StringVar(&e.command, "command", "", "tensorferry `binary` (default: built from this module)")
	f.IntVar(&e.calls, "calls", 1000, "sessions: `how many` have a call of 1 MiB each in flight at the same time")
	f.IntVar(&e.idle, "idle", 10000, "sessions: `how many` are idle")
	f.DurationVar(&e.rest, "rest", 20*time.Second, "sessions: how `long` they stay idle")
	f.IntVar(&e.kills, "n", 200, "crash, restarts: how many `times` a server or a client is ended, in each of its parts")
	f.StringVar(&e.folder, "folder", "", "crash: `where` the store is, for a file system of your choice (default a temporary folder)")
	f.Uint64Var(&e.seed, "seed", uint64(time.Now().UnixNano()), "crash, restarts, soak: the `seed` of the random choices")
	f.DurationVar(&e.lasts, "for", 0, "receive: how `long` each attack lasts (20s); soak: how long all of it (20m)")
	f.StringVar(&e.only, "only", "", "receive: the `name` of the only attack")
	f.StringVar(&e.tls, "tls", "folder", "soak: the `stores` whose servers are reached over TLS with a token, of folder and memory, with a comma between")
	f.IntVar(&e.clients, "clients", 16, "restarts: `how many` clients")
}

func main() {
	harness.Main("stress", func(ctx context.Context) error { return run(ctx, os.Stdout, os.Args[1:]) })
}

func run(ctx context.Context, out io.Writer, args []string) error {
	if len(args) == 3 && others[args[0]] != nil {
		return others[args[0]](ctx, args[1], args[2])
	}
	var list strings.Builder
	for _, p := range programs {
		fmt.Fprintf(&list, "\n  %-9s %s", p.name, p.what)
		if len(args) == 0 || p.name != args[0] {
			continue
		}
		e := &environment{out: out}
		f := flag.NewFlagSet(p.name, flag.ContinueOnError)
		f.SetOutput(out)
		e.flags(f)
		if err := f.Parse(args[1:]); err != nil {
			return err
		}
		if f.NArg() > 0 {
			return fmt.Errorf("%s takes no argument %q", p.name, f.Arg(0))
		}
		return e.judge(ctx, p.name, p.run)
	}
	return fmt.Errorf("say which program, and -h for its flags:%s", &list)
}

// judge runs a program and prints how it ended.
func (e *environment) judge(ctx context.Context, name string, run func(context.Context, *environment) error) (err error) {
	if e.dir, err = os.MkdirTemp("", "tensorferry-stress-"); err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(e.dir) }()
	fmt.Fprintln(e.out, harness.ThisMachine())
	if e.command == "" {
		if e.command, err = harness.Tensorferry(ctx, e.dir); err != nil {
			return err
		}
	}
	if err := run(ctx, e); err != nil {
		e.add("%v", err)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	all := e.all()
	for _, p := range all {
		fmt.Fprintf(e.out, "%s: problem: %s\n", name, p)
	}
	if len(all) > 0 {
		fmt.Fprintf(e.out, "%s: FAIL\n", name)
		return errors.New("it did not show what it should")
	}
	fmt.Fprintf(e.out, "%s: PASS\n", name)
	return nil
}

// problems collects what went wrong. Safe for concurrent use.
type problems struct {
	mu    sync.Mutex
	list  []string // guarded by mu
	count int      // guarded by mu
}

func (p *problems) add(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.count++; p.count <= problemsKept {
		p.list = append(p.list, fmt.Sprintf(format, args...))
	}
}

func (p *problems) all() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if more := p.count - len(p.list); more > 0 {
		return append(slices.Clip(p.list), fmt.Sprintf("%d more", more))
	}
	return p.list
}

// each does n things, at most so many at a time, and returns how many failed and how
// the first ones did.
func each(n, most int, do func(i int) error) error {
	failed := make([]error, n)
	turns := make(chan struct{}, most)
	var all sync.WaitGroup
	for i := range n {
		turns <- struct{}{}
		all.Go(func() {
			if err := do(i); err != nil {
				failed[i] = fmt.Errorf("%d: %w", i, err)
			}
			<-turns
		})
	}
	all.Wait()
	failed = slices.DeleteFunc(failed, func(err error) bool { return err == nil })
	if len(failed) == 0 {
		return nil
	}
	return fmt.Errorf("%d of %d failed: %w", len(failed), n, errors.Join(failed[:min(len(failed), problemsKept)]...))
}

// pause waits, at most until ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
