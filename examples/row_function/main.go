// Command row_function serves a function of one's own: a Go function over rows
// becomes a model that computes each block as soon as it is there, however the
// tensor was cut on its way.
//
//	go run ./examples/row_function
package main

import (
	"context"
	"fmt"
	"math"
	"os"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/examples/local"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

// norms is the length of each row, as a vector: float32[... n] becomes float32[... 1].
var norms = cpu.RowFunc{
	Info: engine.Info{
		Name: "norms",
		// All axes but the last tell rows apart; the last one is the row.
		Rows:    engine.AllButLast,
		Inputs:  []engine.Port{{Name: "x", DTypes: []tensor.DataType{tensor.Float32}, Shape: []int64{engine.AnyAxes, engine.Free}}},
		Outputs: []engine.Port{{Name: "y", DTypes: []tensor.DataType{tensor.Float32}, Shape: []int64{engine.AnyAxes, 1}}},
	},
	Outs: func(in []tensor.Desc, _ map[string]string) ([]tensor.Desc, error) {
		y := in[0].Clone()
		y.Shape[len(y.Shape)-1] = 1
		return []tensor.Desc{y}, nil
	},
	// The function sees some rows of a call, whose memory is lent until it returns.
	Rows: cpu.Rows(func(_ context.Context, b cpu.RowBlock, in, out [][]float32) error {
		width := len(in[0]) / int(b.Rows)
		for i := range out[0] {
			var sum float64
			for _, v := range in[0][i*width : (i+1)*width] {
				sum += float64(v) * float64(v)
			}
			out[0][i] = float32(math.Sqrt(sum))
		}
		return nil
	}),
}

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "row_function:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	host := cpu.NewHost(cpu.HostConfig{})
	defer host.Close()
	model, err := norms.Model(host)
	if err != nil {
		return err
	}
	address, stop, err := local.Serve(host, server.Config{}, model)
	if err != nil {
		return err
	}
	defer func() { _ = stop() }()
	c, err := client.Dial(address, client.Config{})
	if err != nil {
		return err
	}
	defer c.Close()
	x, err := tensor.Of([]float32{3, 4, 5, 12, 8, 15}, 3, 2)
	if err != nil {
		return err
	}
	y, err := c.Compute(ctx, "norms", x)
	if err != nil {
		return err
	}
	lengths, err := tensor.Slice[float32](y)
	if err != nil {
		return err
	}
	fmt.Printf("%v has rows of the lengths %v\n", x.Desc, lengths)
	return nil
}
