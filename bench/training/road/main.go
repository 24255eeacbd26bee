//go:build linux

// Command road runs two programs at the two ends of a link of internal/roads: a
// server of tensorferry, and a client that gets the server's address as its last argument.
// Where the system has no network namespaces it says why and runs neither.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/tensorferry/tensorferry/internal/proc"
	"github.com/tensorferry/tensorferry/internal/roads"
)

const (
	mtu  = 9000
	rate = 1e9 // bits per second
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "road:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) (err error) {
	rtt := flag.Duration("rtt", 50*time.Millisecond, "round trip of the link")
	flag.Parse()
	args := flag.Args()
	at := slices.Index(args, "--")
	if at < 1 || at == len(args)-1 {
		return errors.New("give two commands with -- between them: road [-rtt 50ms] tensorferry serve --child [flags] -- client [args]")
	}
	serve, use := slices.Clip(args[:at]), slices.Clip(args[at+1:])
	r, err := roads.New(ctx, roads.Link{Way: roads.Way{Delay: *rtt / 2, Rate: rate}, MTU: mtu})
	if no := new(roads.UnavailableError); errors.As(err, &no) {
		fmt.Println(err)
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if err := roads.Hurry(); err != nil {
		fmt.Fprintln(os.Stderr, "road: the link is carried beside other work, which makes packets late:", err)
	}
	here, there := r.Ends[0], r.Ends[1]
	s, address, err := proc.Serve(ctx, there.Command(ctx, serve[0], append(serve[1:], "--listen", there.Addr.String()+":50051")...))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Stop()) }()
	c := here.Command(ctx, use[0], append(use[1:], address)...)
	c.Stdout, c.Stderr = os.Stdout, os.Stderr
	return c.Run()
}
