package client_test

import (
	"context"
	"fmt"
	"net"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

// computeRelu is what the README shows.
func computeRelu(ctx context.Context, address string) error {
	c, err := client.Dial(address, client.Config{})
	if err != nil {
		return err
	}
	defer c.Close()
	x, err := tensor.Of([]float32{-1, 2, -3, 4}, 2, 2) // over the slice, no copy
	if err != nil {
		return err
	}
	y, err := c.Compute(ctx, "relu", x)
	if err != nil {
		return err
	}
	values, err := tensor.Slice[float32](y)
	if err != nil {
		return err
	}
	fmt.Println(y.Desc, values) // float32[2 2] [0 2 0 4]
	return nil
}

func ExampleClient_Compute() {
	address, stop := serveBuiltins()
	defer stop()
	if err := computeRelu(context.Background(), address); err != nil {
		fmt.Println(err)
	}
	// Output: float32[2 2] [0 2 0 4]
}

// serveBuiltins is a server as tensorferry serve runs it, in this process.
func serveBuiltins() (address string, stop func()) {
	host := engine.NewHost(engine.HostConfig{})
	models := engine.NewRegistry()
	for _, m := range cpu.Builtins(host) {
		if err := models.Add(m); err != nil {
			panic(err)
		}
	}
	s, err := server.New(server.Config{Models: models, Pool: host.Pool(), Budget: host.Budget()})
	if err != nil {
		panic(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }() // ends with s.Close
	return l.Addr().String(), func() { s.Close(); <-served; host.Close() }
}
