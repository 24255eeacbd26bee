// Package demo runs a network that is split between this process and a server, and compares what it
// predicts with torch.
package demo

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/examples/fashion"
	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/moving"
	"github.com/tensorferry/tensorferry/internal/proc"
	"github.com/tensorferry/tensorferry/tensor"
)

// Trunk is the model that the demo needs of a server.
const Trunk = "fashion-trunk"

// Run runs the demo and writes a report to out as it proceeds.
func Run(ctx context.Context, at moving.Access, args []string, out io.Writer) error {
	server := at.Server
	if at.Server == "" {
		exe, err := os.Executable()
		if err != nil {
			return err
		}
		child, address, err := Start(ctx, exe, append(args, "--demo")...)
		if err != nil {
			return err
		}
		defer func() { _ = child.Stop() }() // its exit status no longer matters
		at = moving.Access{Server: address}
		server = fmt.Sprintf("%s, process %d", address, child.Process.Pid)
	}
	cl, err := at.Dial()
	if err != nil {
		return err
	}
	defer cl.Close()
	trunk, err := moving.FindModel(ctx, cl, Trunk, "start it with tensorferry serve --demo")
	if err != nil {
		return err
	}
	if trunk.Device != "" {
		server += ", " + display.Plain(trunk.Device)
	}
	w := bufio.NewWriter(out) // remembers its first error
	fmt.Fprintf(w, "Fashion-MNIST, %d images, a network split in three\n", fashion.Count)
	fmt.Fprintf(w, "  bottom  784 > 128  here\n  trunk   128 > 128  %s\n  top     128 > 10   here\n\n", server)
	_ = w.Flush() // some text before the work; an error comes back from the last one
	before, err := cl.Info(ctx)
	if err != nil {
		return err
	}
	classes, took, err := classify(ctx, cl)
	if err != nil {
		return err
	}
	after, err := cl.Info(ctx)
	if err != nil {
		return err
	}
	counted := func(name string) int64 { return after.Counters[name] - before.Counters[name] }
	same := fmt.Sprintf("all %d are identical to torch's", fashion.Count)
	wrong := differing(classes, fashion.Predictions())
	if wrong > 0 {
		same = fmt.Sprintf("%d of %d DIFFER from torch's", wrong, fashion.Count)
	}
	_, labels := fashion.Images()
	right := fashion.Count - differing(classes, labels)
	fmt.Fprintf(w, "predictions    %s, %.1f %% are right\n", same, 100*float64(right)/fashion.Count)
	fmt.Fprintf(w, "activations    the server counted %d bytes in and %d out\n", counted("received_bytes_total"), counted("sent_bytes_total"))
	fmt.Fprintf(w, "time           %.0f ms through all three\n", 1e3*took.Seconds())
	writeNext(w)
	if err := w.Flush(); err != nil || wrong == 0 {
		return err
	}
	return fmt.Errorf("%d of %d predictions differ from those of torch", wrong, fashion.Count)
}

// classify runs the images through the three parts of the network, and returns the class of
// each and how long that took.
func classify(ctx context.Context, cl *client.Client) (classes []byte, took time.Duration, err error) {
	host := cpu.NewHost(cpu.HostConfig{})
	defer host.Close()
	bottom, err := cpu.LoadFS(host, fashion.ModelFS(), "bottom")
	top, bad := cpu.LoadFS(host, fashion.ModelFS(), "top")
	if err = errors.Join(err, bad); err != nil {
		return nil, 0, err
	}
	gray, _ := fashion.Images()
	images, err := tensor.Of(display.Each(gray, func(p byte) float32 { return float32(p) / 255 }), fashion.Count, fashion.Pixels)
	if err != nil {
		return nil, 0, err
	}
	begin := time.Now()
	hidden, err := engine.Compute(ctx, bottom, nil, images)
	if err != nil {
		return nil, 0, err
	}
	y, err := cl.Compute(ctx, Trunk, hidden[0])
	if err != nil {
		return nil, 0, err
	}
	out, err := engine.Compute(ctx, top, nil, y)
	if err != nil {
		return nil, 0, err
	}
	logits, err := tensor.Slice[float32](out[0])
	if err != nil {
		return nil, 0, err
	}
	for row := range slices.Chunk(logits, len(fashion.ClassNames)) {
		classes = append(classes, byte(slices.Index(row, slices.Max(row))))
	}
	return classes, time.Since(begin), nil
}

// differing counts the predictions that are not those wanted.
func differing(classes, want []byte) (count int) {
	for i, c := range classes {
		if c != want[i] {
			count++
		}
	}
	return count
}

func writeNext(w io.Writer) {
	self := "tensorferry"
	if exe, err := os.Executable(); err == nil && strings.Contains(exe, "go-build") { // go run's
		self = "go run ./cmd/tensorferry"
	}
	fmt.Fprintf(w, `
try next
  %[1]s serve --demo
      runs a server until Ctrl-C; demo --server ADDRESS and the next line use it
  %[1]s run relu --dtype int8 --shape 8,16 < /dev/urandom | od -An -td1
      sends a tensor of your own through a model of that server
  %[1]s bench
      compares with raw TCP and stock gRPC on this machine; takes several minutes
`, self)
}

// Start runs serve from the tensorferry binary exe on a free loopback port and waits
// until it listens. It ends with this process at the latest; the caller stops it.
func Start(ctx context.Context, exe string, args ...string) (c *proc.Child, address string, err error) {
	args = append([]string{"serve", "--child", "--listen", "127.0.0.1:0"}, args...)
	return proc.Serve(ctx, exec.CommandContext(ctx, exe, args...))
}
