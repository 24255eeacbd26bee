package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// oneOrder is how long after the first a further signal is the same order to stop:
// GNU timeout signals its child and then the whole process group, a terminal does as
// much beside whoever passes an interrupt on. Nobody who means a second one is faster.
const oneOrder = 500 * time.Millisecond

// untilInterrupted returns a context that ends when the process is told to stop;
// told again, the process ends at once. It starts a goroutine that ends with the
// process.
func untilInterrupted() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	// Room for both: the second may come before the first has been looked at.
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		obey(signals, cancel)
		fmt.Fprintln(os.Stderr, "tensorferry: second signal: ending at once")
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
