// Command loop makes each row of a call's input from the result of the row before, as a model
// that makes one token after the other does: a row goes when it is made, and its result comes
// before there is another.
package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/examples/local"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

const rows, width = 50, 64

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

	r, w := io.Pipe() // what is written to w is the input
	defer r.Close()
	call, err := c.Call(ctx, client.Request{
		Model: "affine", Params: map[string]string{"a": "0.5", "b": "1"},
		Inputs: []client.Input{client.FromReader("x", tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{rows, width}}, r)},
	})
	if err != nil {
		return err
	}
	row := make([]byte, width*4)        // zeros
	go func() { _, _ = w.Write(row) }() // ends when it is read, or with r
	made := 1
	for region, err := range call.Regions() {
		if err != nil {
			return err
		}
		if made++; made > rows {
			continue
		}
		row = region.Data // the next row is the result of this one
		go func() { _, _ = w.Write(row) }()
	}
	results, err := call.Wait()
	if err != nil {
		return err
	}
	y, err := tensor.Slice[float32](results["y"])
	if err != nil {
		return err
	}
	fmt.Printf("%d rows of x = x/2 + 1: %v, %v, %v … %v\n", rows, y[0], y[width], y[2*width], y[len(y)-1])
	return nil
}
