package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

// untilInterrupted returns a context that ends when the process is told to stop;
// told again, the process ends at once. It starts a goroutine that ends with the
// process.
func untilInterrupted() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	// Room for both: the second may come before the first has been looked at.
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-signals
		cancel()
		<-signals
		os.Exit(exitInterrupted)
	}()
	return ctx
}
