package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// oneOrder is how long further signals count as part of the first. GNU timeout signals its
// child and then the process group; a terminal signals the group, and a parent may do so,
// too.
const oneOrder = 500 * time.Millisecond

// untilInterrupted returns a context that ends at the first SIGINT, SIGTERM or SIGHUP (a
// closed terminal). At the second, the process exits. It starts a goroutine that ends with
// the process.
func untilInterrupted() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 2) // both may arrive before either is read
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // nohup ignores it
		signal.Notify(signals, syscall.SIGHUP)
	}
	go func() {
		obey(signals, cancel)
		fmt.Fprintln(os.Stderr, "tensorferry: second signal: exiting immediately")
		os.Exit(exitInterrupted)
	}()
	return ctx
}

// obey calls stop at the first signal and returns at the second.
func obey(signals <-chan os.Signal, stop func()) {
	<-signals
	told := time.Now()
	stop()
	for range signals {
		if time.Since(told) >= oneOrder {
			return
		}
	}
}
