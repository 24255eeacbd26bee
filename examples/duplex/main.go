// Command duplex shows that results come back before the input has ended: the
// last rows of a tensor are not sent until results of the first have arrived.
//
//	go run ./examples/duplex
//	go run ./examples/duplex --server 10.0.0.7:50051   (tensorferry serve)
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/examples/fashion"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

// times is how often the images follow each other in the tensor: 3.9 MB, a
// few chunks.
const times = 5

func main() {
	address := flag.String("server", "", "address of a server (default: one of its own)")
	flag.Parse()
	if err := run(context.Background(), *address); err != nil {
		fmt.Fprintln(os.Stderr, "duplex:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, address string) error {
	if address == "" {
		stop, addr, err := serve()
		if err != nil {
			return err
		}
		defer stop()
		address = addr
	}
	c, err := client.Dial(address, client.Config{})
	if err != nil {
		return err
	}
	defer c.Close()
	session, err := c.Session(ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	pixels, _ := fashion.Images()
	desc := tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{times * fashion.Count, fashion.Pixels}}
	in := &held{ctx: ctx, data: pixels, results: make(chan struct{})}
	in.left.Store(int64(times * len(pixels)))
	call, err := session.Call(ctx, client.Request{Model: "echo", Inputs: []client.Input{client.FromReader("x", desc, in)}})
	if err != nil {
		return err
	}
	// Regions are what has arrived, in the order of arrival; a failure comes last.
	var got, before int
	for region, err := range call.Regions() {
		if err != nil {
			return err
		}
		in.once.Do(func() { close(in.results) })
		got += len(region.Data)
		if in.left.Load() > 0 {
			before = got
		}
	}
	if _, err := call.Wait(); err != nil {
		return err
	}
	t := call.Timings()
	fmt.Printf("%v: %d of %d bytes had come back before the last were read; first result after %v of %v\n",
		desc, before, got, t.FirstResult, t.Total)
	return nil
}

// held reads data again and again, and the second half of it all only once there
// are results: a server that wanted the whole tensor first would wait for good.
type held struct {
	ctx     context.Context
	data    []byte
	off     int
	left    atomic.Int64
	once    sync.Once
	results chan struct{} // closed when the first has come
}

func (h *held) Read(p []byte) (int, error) {
	switch left := h.left.Load(); {
	case left == 0:
		return 0, io.EOF
	case left <= int64(times*len(h.data)/2):
		select {
		case <-h.results:
		case <-h.ctx.Done():
			return 0, context.Cause(h.ctx)
		}
	}
	n := copy(p, h.data[h.off:])
	h.off = (h.off + n) % len(h.data)
	h.left.Add(-int64(n))
	return n, nil
}

// serve starts a server with the built-in models on a free port of this machine.
func serve() (stop func(), address string, err error) {
	host := cpu.NewHost(cpu.HostConfig{})
	models := engine.NewRegistry()
	for _, m := range cpu.Builtins(host) {
		if err := models.Add(m); err != nil {
			host.Close()
			return nil, "", err
		}
	}
	s, err := server.New(server.Config{Models: models, Pool: host.Pool(), Budget: host.Budget()})
	if err != nil {
		host.Close()
		return nil, "", err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		host.Close()
		return nil, "", err
	}
	served := make(chan struct{})
	go func() { // ends with s.Close
		defer close(served)
		if err := s.Serve(l); err != nil {
			fmt.Fprintln(os.Stderr, "duplex:", err)
		}
	}()
	return func() { s.Close(); <-served; host.Close() }, l.Addr().String(), nil
}
