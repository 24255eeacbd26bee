// Command loop makes each row from the result of the row before, as a model that makes one token
// after the other does: each step of a sequence brings a row, and its result comes before there
// is another.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/examples/local"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	host := cpu.NewHost(cpu.HostConfig{})
	defer host.Close()
	address, stop, err := local.Serve(host, server.Config{}, cpu.Builtins(host)...)
	if err != nil {
		return err
	}
	defer func() { _ = stop() }()
	c, err := client.Dial(address, client.Config{})
	if err != nil {
		return err
	}
	defer c.Close()

	q, err := c.Sequence(ctx, client.SequenceRequest{Model: "affine", MaxRows: 50, Params: map[string]string{"a": "0.5", "b": "1"}})
	if err != nil {
		return err
	}
	defer q.Close()
	row, err := tensor.Of([]float32{0, 8}, 1, 2)
	for err == nil && q.Rows() < 50 {
		row, err = q.Step(ctx, row) // the next row is the result of this one
	}
	if err != nil {
		return err
	}
	x, err := tensor.Slice[float32](row)
	fmt.Printf("x = x/2 + 1, %d times from [0 8]: %v\n", q.Rows(), x)
	return err
}
