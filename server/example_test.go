package server_test

import (
	"context"
	"fmt"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

func serveSquares(ctx context.Context) error {
	host := cpu.NewHost(cpu.HostConfig{})
	defer host.Close()
	port := func(name string) []engine.Port {
		return []engine.Port{{Name: name, DTypes: []tensor.DataType{tensor.Float32}, Shape: []int64{engine.AnyAxes}}}
	}
	square, err := cpu.RowFunc{
		Info: engine.Info{Name: "square", Rows: engine.AllAxes, Inputs: port("x"), Outputs: port("y"), Idempotent: true},
		Rows: cpu.Rows(func(_ context.Context, _ cpu.RowBlock, in, out [][]float32) error {
			for i, v := range in[0] {
				out[0][i] = v * v
			}
			return nil
		}),
	}.Model(host)
	if err != nil {
		return err
	}
	return server.ListenAndServe(ctx, "127.0.0.1:50051", square) // server.New has a store, TLS and limits, too
}

// A model of a Go function, served on this machine.
func ExampleListenAndServe() {
	fmt.Println(serveSquares(context.Background()))
}
