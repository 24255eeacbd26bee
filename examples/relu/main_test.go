package main

import (
	"context"
	"fmt"
	"net"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/server"
)

func Example() {
	if err := serveAndCompute(); err != nil {
		fmt.Println(err)
	}
	// Output: float32[2 2] [0 2 0 4]
}

// serveAndCompute computes on a server of its own.
func serveAndCompute() error {
	host := cpu.NewHost(cpu.HostConfig{})
	defer host.Close()
	models := engine.NewRegistry()
	for _, m := range cpu.Builtins(host) {
		if err := models.Add(m); err != nil {
			return err
		}
	}
	s, err := server.New(server.Config{Models: models, Pool: host.Pool(), Budget: host.Budget()})
	if err != nil {
		return err
	}
	defer s.Close()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	go func() { _ = s.Serve(l) }() // ends with Close
	return computeRelu(context.Background(), l.Addr().String())
}
