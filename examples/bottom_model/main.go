// Command bottom_model is split inference in one page: the bottom of a network
// runs here, block by block; its activations stream to a server that runs the
// trunk; what comes back goes through the top, here again.
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
	"net"
	"os"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/examples/fashion"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

// hidden is the width of what travels between the parts of the network.
const hidden = 128

// blockRows is how many images the bottom model takes at a time.
const blockRows = 100

func main() {
	address := flag.String("server", "", "address of a server with the model fashion-trunk (default: one of its own)")
	flag.Parse()
	if err := run(context.Background(), *address); err != nil {
		fmt.Fprintln(os.Stderr, "bottom_model:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, address string) error {
	// Both models of this side share a host: workers, and memory within a budget.
	host := cpu.NewHost(cpu.HostConfig{})
	defer host.Close()
	bottom, err := cpu.LoadFS(host, fashion.ModelFS(), "bottom")
	if err != nil {
		return err
	}
	top, err := cpu.LoadFS(host, fashion.ModelFS(), "top")
	if err != nil {
		return err
	}
	if address == "" {
		stop, addr, err := serveTrunk()
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
	// The activations are made while they are sent: FromReader reads a bounded
	// number of chunks ahead, and the reader runs the bottom model when it is read.
	desc := tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{fashion.Count, hidden}}
	call, err := session.Call(ctx, client.Request{
		Model:  "fashion-trunk",
		Inputs: []client.Input{client.FromReader("x", desc, &activations{ctx: ctx, model: bottom, images: images()})},
	})
	if err != nil {
		return err
	}
	results, err := call.Wait()
	if err != nil {
		return err
	}
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

// activations reads as what the bottom model makes of the images.
type activations struct {
	ctx    context.Context
	model  engine.Model
	images []float32 // not yet computed
	block  []byte    // computed and not yet read
}

func (a *activations) Read(p []byte) (int, error) {
	if len(a.block) == 0 {
		rows := min(blockRows, len(a.images)/fashion.Pixels)
		if rows == 0 {
			return 0, io.EOF
		}
		x, err := tensor.Of(a.images[:rows*fashion.Pixels], int64(rows), fashion.Pixels)
		if err != nil {
			return 0, err
		}
		y, err := engine.Compute(a.ctx, a.model, nil, x)
		if err != nil {
			return 0, err
		}
		a.images, a.block = a.images[rows*fashion.Pixels:], y[0].Data
	}
	n := copy(p, a.block)
	a.block = a.block[n:]
	return n, nil
}

// serveTrunk starts a server with the trunk on a free port of this machine.
func serveTrunk() (stop func(), address string, err error) {
	host := cpu.NewHost(cpu.HostConfig{})
	models := engine.NewRegistry()
	trunk, err := cpu.LoadFS(host, fashion.ModelFS(), "trunk")
	if err == nil {
		err = models.Add(trunk)
	}
	if err != nil {
		host.Close()
		return nil, "", err
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
			fmt.Fprintln(os.Stderr, "bottom_model:", err)
		}
	}()
	return func() { s.Close(); <-served; host.Close() }, l.Addr().String(), nil
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
	for i := range labels {
		best := byte(0)
		for c, v := range values[i*classes : (i+1)*classes] {
			if v > values[i*classes+int(best)] {
				best = byte(c)
			}
		}
		if best == labels[i] {
			right++
		}
		if best == torch[i] {
			same++
		}
	}
	fmt.Printf("%d images, %d right, %d as torch predicted\n", len(labels), right, same)
	if same != len(labels) {
		return errors.New("the predictions are not those of torch")
	}
	return nil
}
