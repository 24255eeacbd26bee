// Command bottom_model is split inference in one page: the bottom of a network
// runs here, block by block; its activations stream to a server that runs the
// trunk; what comes back goes through the top, here again. Results come back
// before the input has ended: its second half waits for results of the first.
//
//	go run ./examples/bottom_model
//	go run ./examples/bottom_model --server 10.0.0.7:50051   (tensorferry serve --demo)
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/examples/fashion"
	"github.com/tensorferry/tensorferry/examples/local"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

const (
	hidden    = 128               // the width of what travels between the parts of the network
	blockRows = 100               // how many images the bottom model takes at a time
	total     = 8 * fashion.Count // the images follow each other eight times: 4 MB of activations, a few chunks
)

func main() {
	address := flag.String("server", "", "address of a server with the model fashion-trunk (default: one of its own)")
	flag.Parse()
	if err := run(context.Background(), *address); err != nil {
		fmt.Fprintln(os.Stderr, "bottom_model:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, address string) error {
	// All models of this process share a host: workers, and memory within a budget.
	host := cpu.NewHost(cpu.HostConfig{})
	defer host.Close()
	var parts [len(fashion.Models)]engine.Model
	for i, name := range fashion.Models {
		var err error
		if parts[i], err = cpu.LoadFS(host, fashion.ModelFS(), name); err != nil {
			return err
		}
	}
	bottom, trunk, top := parts[0], parts[1], parts[2]
	if address == "" {
		addr, stop, err := local.Serve(host, server.Config{}, trunk)
		if err != nil {
			return err
		}
		defer func() { _ = stop() }()
		address = addr
	}

	c, err := client.Dial(address, client.Config{})
	if err != nil {
		return err
	}
	defer c.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// The activations are made while they are sent: FromReader reads a bounded
	// number of chunks ahead, and the reader runs the bottom model when it is read.
	desc := tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{total, hidden}}
	in := &activations{ctx: ctx, model: bottom, images: images(), results: make(chan struct{})}
	call, err := c.Call(ctx, client.Request{Model: "fashion-trunk", Inputs: []client.Input{client.FromReader("x", desc, in)}})
	if err != nil {
		return err
	}
	// Regions are what has arrived, in the order of arrival; a failure comes last.
	var got, before int
	came := sync.OnceFunc(func() { close(in.results) })
	for region, err := range call.Regions() {
		if err != nil {
			return err
		}
		came()
		got += len(region.Data)
		if in.next.Load() < total {
			before = got
		}
	}
	results, err := call.Wait()
	if err != nil {
		return err
	}
	fmt.Printf("%v: %d of %d bytes had come back before the last were computed\n", desc, before, got)
	out, err := engine.Compute(ctx, top, nil, results["y"])
	if err != nil {
		return err
	}
	return report(out[0])
}

// images returns the pictures as the network takes them.
func images() []float32 {
	pixels, _ := fashion.Images()
	x := make([]float32, len(pixels))
	for i, p := range pixels {
		x[i] = float32(p) / 255
	}
	return x
}

// activations reads as what the bottom model makes of the images, again and again.
// The second half waits for results: a server that wanted the whole tensor first
// would wait for good.
type activations struct {
	ctx     context.Context
	model   engine.Model
	images  []float32
	next    atomic.Int64  // the image to compute
	block   []byte        // computed and not yet read
	results chan struct{} // closed when the first have come
}

func (a *activations) Read(p []byte) (int, error) {
	if len(a.block) == 0 {
		next := a.next.Load()
		if next == total {
			return 0, io.EOF
		}
		if next >= total/2 {
			select {
			case <-a.results:
			case <-a.ctx.Done():
				return 0, context.Cause(a.ctx)
			}
		}
		x, err := tensor.Of(a.images[next%fashion.Count*fashion.Pixels:][:blockRows*fashion.Pixels], blockRows, fashion.Pixels)
		if err != nil {
			return 0, err
		}
		y, err := engine.Compute(a.ctx, a.model, nil, x)
		if err != nil {
			return 0, err
		}
		a.block = y[0].Data
		a.next.Store(next + blockRows)
	}
	n := copy(p, a.block)
	a.block = a.block[n:]
	return n, nil
}

// report compares the classes with the labels and with what torch predicted.
func report(logits tensor.Tensor) error {
	values, err := tensor.Slice[float32](logits)
	if err != nil {
		return err
	}
	_, labels := fashion.Images()
	torch := fashion.Predictions()
	const classes = len(fashion.ClassNames)
	right, same := 0, 0
	for i := range total {
		best := byte(0)
		for c, v := range values[i*classes : (i+1)*classes] {
			if v > values[i*classes+int(best)] {
				best = byte(c)
			}
		}
		if best == labels[i%fashion.Count] {
			right++
		}
		if best == torch[i%fashion.Count] {
			same++
		}
	}
	fmt.Printf("%d images, %d right, %d as torch predicted\n", total, right, same)
	if same != total {
		return errors.New("the predictions are not those of torch")
	}
	return nil
}
