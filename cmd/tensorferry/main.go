// Command tensorferry serves models, runs them on files and pipes, stores and compares
// tensors, and measures performance. It chooses engines and connects packages; it contains
// no logic that users of the library would need.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/cli/serve"
	"github.com/tensorferry/tensorferry/internal/cli/verbs"
)

// ballast is the minimum growth of the Go heap between two collections. The heap holds no
// payload, only a few MB of bookkeeping, which are not worth a collection every 4 MB. A
// larger GOGC would do the same for a small heap, but would also let a large one grow.
const ballast = 16 << 20

func main() {
	never := make([]byte, ballast) // never touched, so not in memory
	bench.BeServer()               // exits if the bench command has started this process
	code := verbs.Run(untilInterrupted(), verbs.Command())
	runtime.KeepAlive(never)
	os.Exit(code)
}

// signalRepeat is how long further signals count as part of the first: GNU timeout signals its
// child and then its group, and so may a terminal and a parent.
const signalRepeat = 500 * time.Millisecond

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
		handleSignals(signals, cancel)
		time.AfterFunc(serve.FlushWait, func() { os.Exit(fail.ExitInterrupted) }) // nobody may read this:
		fmt.Fprintln(os.Stderr, "tensorferry: second signal: exiting immediately")
		os.Exit(fail.ExitInterrupted)
	}()
	return ctx
}

// handleSignals calls stop at the first signal and returns at the second.
func handleSignals(signals <-chan os.Signal, stop func()) {
	var stopped time.Time
	for s := range signals {
		switch f := serve.OnHangup.Load(); {
		case s == syscall.SIGHUP && f != nil:
			go (*f)() // ends when it has read some files, for which no other signal waits
		case stopped.IsZero():
			stopped = time.Now()
			stop()
		case time.Since(stopped) >= signalRepeat:
			return
		}
	}
}
