// Command relu computes a model on a server at 127.0.0.1:50051: it is what README shows.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/tensor"
)

func main() {
	if err := computeRelu(context.Background(), "127.0.0.1:50051"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

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
