package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/examples/fashion"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/stream"
)

const (
	defaultListen = "127.0.0.1:50051"
	// memoryShare: tensors in assembly and computation may take this part
	// (1/memoryShare) of what the process may have.
	memoryShare = 4
	// drainWait is how long a stopping server lets open calls finish.
	drainWait = 10 * time.Second
)

// serveOptions are the flags of serve.
type serveOptions struct {
	listen   string
	models   []string
	memory   int64
	workers  int
	tensor   int64
	insecure bool
	verbose  bool
	demo     bool
	child    bool
}

func serveCommand() *cobra.Command {
	var o serveOptions
	c := &cobra.Command{
		Use:   "serve",
		Short: "serve the built-in models and your own",
		Long: `Serve runs a server until it is interrupted: it then takes no new calls, lets
open ones finish for 10 s, and ends.

A model is a folder with model.json and weights.safetensors (docs/engine.md).`,
		Example: `  tensorferry serve
  tensorferry serve --listen unix:/tmp/ferry.sock --model trunk=models/trunk`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			ctx := c.Context()
			if !o.child {
				return serve(ctx, o, io.Discard)
			}
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			go func() { // ends with the input, at the latest with the process
				_, _ = io.Copy(io.Discard, c.InOrStdin())
				cancel()
			}()
			return serve(ctx, o, c.OutOrStdout())
		},
	}
	f := c.Flags()
	f.StringVar(&o.listen, "listen", defaultListen, "`address` to listen on: host:port or unix:/path")
	f.StringArrayVar(&o.models, "model", nil, "serve the model in a folder, as `name=folder` or folder; repeatable")
	f.Int64Var(&o.memory, "memory", 0, "most `bytes` of tensors in memory (default a quarter of what the process may have)")
	f.IntVar(&o.workers, "workers", 0, "blocks computed at a time (default the number of CPUs)")
	f.Int64Var(&o.tensor, "max-tensor", 0, "largest tensor accepted, in `bytes` (default 16 GiB)")
	f.BoolVar(&o.insecure, "insecure", false, "allow a listener that other machines reach: there is no encryption and no authentication yet")
	f.BoolVarP(&o.verbose, "verbose", "v", false, "log every session")
	f.BoolVar(&o.demo, "demo", false, "serve the model that tensorferry demo --server needs, too")
	f.BoolVar(&o.child, "child", false, "print the address to stdout, and stop when stdin ends")
	if err := f.MarkHidden("child"); err != nil {
		panic(err) // the flag is named two lines above
	}
	return c
}

// newHost returns an engine's memory and workers with the models that run there.
// The caller closes the models, then the host.
func newHost(memory int64, workers int, folders []string, demo bool) (*engine.Host, *engine.Registry, error) {
	if memory <= 0 {
		memory = processMemory(os.DirFS("/")) / memoryShare
	}
	h := engine.NewHost(engine.HostConfig{MemoryBytes: memory, Workers: workers})
	models := engine.NewRegistry()
	add := func(m engine.Model, err error) error {
		if err != nil {
			return err
		}
		return models.Add(m)
	}
	var err error
	for _, m := range cpu.Builtins(h) {
		err = errors.Join(err, add(m, nil))
	}
	for _, text := range folders {
		err = errors.Join(err, add(loadModel(h, text)))
	}
	if demo {
		err = errors.Join(err, add(cpu.LoadFS(h, fashion.ModelFS(), "trunk")))
	}
	if err != nil {
		models.Close()
		h.Close()
		return nil, nil, err
	}
	return h, models, nil
}

// loadModel loads name=folder, or a folder under the name in its model.json.
func loadModel(h *engine.Host, text string) (engine.Model, error) {
	name, folder, named := strings.Cut(text, "=")
	if !named {
		name, folder = "", text
	}
	m, err := cpu.Load(h, folder)
	if err != nil {
		return nil, err
	}
	if name != "" {
		return engine.Named(name, m), nil
	}
	return m, nil
}

// serve runs a server until ctx ends. Once it listens, it writes its address to ready.
func serve(ctx context.Context, o serveOptions, ready io.Writer) error {
	level := slog.LevelWarn
	if o.verbose {
		level = slog.LevelInfo
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	h, models, err := newHost(o.memory, o.workers, o.models, o.demo)
	if err != nil {
		return err
	}
	defer h.Close()
	defer models.Close()
	s, err := server.New(server.Config{
		Models: models, Pool: h.Pool(), Budget: h.Budget(), Log: log, Version: version,
		Session: stream.Limits{TensorBytes: o.tensor},
	})
	if err != nil {
		return err
	}
	l, err := listen(o.listen, o.insecure)
	if err != nil {
		return err
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	fmt.Fprintf(os.Stderr, "tensorferry %s serves %d models on %s\n", version, len(models.Infos()), addressOf(l))
	fmt.Fprintln(ready, addressOf(l))
	select {
	case err := <-served:
		s.Close()
		return err
	case <-ctx.Done():
	}
	fmt.Fprintln(os.Stderr, "tensorferry: stopping; open calls may finish")
	drain, cancel := context.WithTimeout(context.Background(), drainWait)
	defer cancel()
	if err := s.Shutdown(drain); err != nil {
		fmt.Fprintln(os.Stderr, "tensorferry: calls that were still open have been cancelled")
	}
	return <-served
}

// listen opens a listener; one that other machines reach has to be asked for.
func listen(address string, insecure bool) (net.Listener, error) {
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		return net.Listen("unix", strings.TrimPrefix(path, "//"))
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, usage("--listen %q is no address: %v; write host:port or unix:/path", address, err)
	}
	if ip := net.ParseIP(host); !insecure && host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return nil, usage("--listen %s would be open to other machines without encryption or authentication; add --insecure if that is what you want", address)
	}
	return net.Listen("tcp", address)
}

// addressOf is what a client dials.
func addressOf(l net.Listener) string {
	if l.Addr().Network() == "unix" {
		return "unix:" + l.Addr().String()
	}
	return l.Addr().String()
}
