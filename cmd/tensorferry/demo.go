package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/vbauerster/mpb/v8/decor"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/engine/cuda"
	"github.com/tensorferry/tensorferry/examples/fashion"
	"github.com/tensorferry/tensorferry/internal/proc"
	"github.com/tensorferry/tensorferry/tensor"
)

const (
	demoTrunk = "fashion-trunk"
	// demoTimes makes the images 1.6 GB: far more memory than the processes use.
	demoTimes = 500
	// demoMaxTimes keeps the images below the 16 GiB that a server takes by default.
	demoMaxTimes = 16 << 30 / (fashion.Count * fashion.Pixels * 4)
)

func demoCommand() *cobra.Command {
	var at access
	var where, driver string
	var times int
	c := &cobra.Command{
		Use:   "demo",
		Short: "run a split network over a socket and compare it with torch",
		Long: `Demo classifies 1000 images of clothes (Fashion-MNIST) with a network that is split
in three: the bottom and the top run in this process, the trunk on a server. Every
prediction must equal the one that torch made with the same weights; otherwise the
exit code is 1. Demo then sends the images many times over as one tensor, to measure
speed and memory.

Demo starts a server of its own and stops it at the end. With --server, it uses a
server that was started with tensorferry serve --demo, on this machine or another.`,
		Example: `  tensorferry demo
  tensorferry demo --server 10.0.0.7:50051`,
		Args: takes(0),
		RunE: func(c *cobra.Command, _ []string) error {
			if err := onDevice(at.server, where, driver); err != nil {
				return err
			}
			return demo(c.Context(), at, []string{"--engine", where, "--cuda-driver", driver}, times, c.OutOrStdout())
		},
	}
	c.Flags().StringVar(&at.server, "server", "", "`address` of a server with the model "+demoTrunk+" (default: start one)")
	at.identityFlags(c)
	c.Flags().StringVar(&where, "engine", autoEngine, "`where` the demo's own server runs the trunk:\nauto, cpu or a device such as cuda:0")
	countsVar(c.Flags(), &times, "times", demoTimes, 1, demoMaxTimes, "how often the images are repeated in one tensor")
	c.Flags().StringVar(&driver, "cuda-driver", os.Getenv("TENSORFERRY_CUDA_DRIVER"), "NVIDIA driver library `file`, as for serve")
	c.Flag("cuda-driver").DefValue = ""
	complete(c, "engine", []string{autoEngine, cpuEngine})
	return c
}

// onDevice rejects an engine that the demo's server cannot use.
func onDevice(server, where, driver string) error {
	if server != "" && where != autoEngine {
		return usage("--engine is for the demo's own server; omit it with --server")
	}
	if err := checkEngine(where); err != nil || where == autoEngine || where == cpuEngine {
		return err
	}
	_, err := cuda.Devices(driver)
	return elsewhere(err, "use --engine auto or cpu")
}

// splitNetwork is the client's part of the demo.
type splitNetwork struct {
	bottom, top engine.Model
	images      tensor.Tensor // float32, fashion.Count rows of fashion.Pixels
	labels      []byte

	classes []byte // predictions for the images, one after the other
	wrong   int    // of these: others than torch's
	differ  int    // predictions for repeated images: others than the first ones
}

// verdict returns an error unless every prediction equals torch's.
func (n *splitNetwork) verdict() error {
	switch {
	case n.wrong > 0:
		return fmt.Errorf("%d of %d predictions differ from those of torch", n.wrong, len(n.classes))
	case n.differ > 0:
		return fmt.Errorf("%d repeated predictions differ from the first ones", n.differ)
	}
	return nil
}

// demo runs the demo and writes a report to out as it proceeds.
func demo(ctx context.Context, at access, serve []string, times int, out io.Writer) error {
	server, pid := at.server, 0
	if at.server == "" {
		exe, err := os.Executable()
		if err != nil {
			return err
		}
		child, address, err := startServer(ctx, exe, append(serve, "--demo")...)
		if err != nil {
			return err
		}
		defer func() { _ = child.Stop() }() // its exit status no longer matters
		at, pid = access{server: address}, child.Process.Pid
		server = fmt.Sprintf("%s, process %d", address, pid)
	}
	host := cpu.NewHost(cpu.HostConfig{})
	defer host.Close()
	n, err := newSplitNetwork(host)
	if err != nil {
		return err
	}
	cl, err := at.dial(client.Config{})
	if err != nil {
		return err
	}
	defer cl.Close()
	trunk, err := findModel(ctx, cl, demoTrunk, "start it with tensorferry serve --demo")
	if err != nil {
		return err
	}
	if trunk.Device != "" {
		server += ", " + plain(trunk.Device)
	}
	w := bufio.NewWriter(out) // remembers its first error until Flush
	fmt.Fprintf(w, "Fashion-MNIST, %d images, a network split in three\n", fashion.Count)
	fmt.Fprintf(w, "  bottom  784 > 128  here\n  trunk   128 > 128  %s\n  top     128 > 10   here\n\n", server)
	hidden, err := n.once(ctx, cl, w)
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "%d times over, as one tensor (some seconds)\n", times)
	if err := w.Flush(); err != nil {
		return err
	}
	if err := n.manyTimes(ctx, cl, w, times, hidden); err != nil {
		return err
	}
	if here, err := proc.ResidentOf(os.Getpid()); err == nil {
		fmt.Fprintf(w, "peak memory    % .1f here", decor.SizeB1000(here.Peak))
		if there, err := proc.ResidentOf(pid); err == nil && pid != 0 {
			fmt.Fprintf(w, ", % .1f in the server", decor.SizeB1000(there.Peak))
		}
		fmt.Fprintf(w, ", for a tensor of % .1f\n", decor.SizeB1000(times*len(n.images.Data)))
	}
	writeNext(w)
	return cmp.Or(w.Flush(), n.verdict())
}

// startServer runs serve from the tensorferry binary exe on a free loopback port and waits
// until it listens. It ends with this process at the latest; the caller stops it.
func startServer(ctx context.Context, exe string, args ...string) (c *proc.Child, address string, err error) {
	args = append([]string{"serve", "--child", "--listen", "127.0.0.1:0"}, args...)
	return proc.Serve(ctx, exec.CommandContext(ctx, exe, args...))
}

func newSplitNetwork(h *cpu.Host) (*splitNetwork, error) {
	gray, labels := fashion.Images()
	n := &splitNetwork{labels: labels}
	var err error
	pixels := each(gray, func(p byte) float32 { return float32(p) / 255 })
	if n.images, err = tensor.Of(pixels, fashion.Count, fashion.Pixels); err != nil {
		return nil, err
	}
	if n.bottom, err = cpu.LoadFS(h, fashion.ModelFS(), "bottom"); err != nil {
		return nil, err
	}
	n.top, err = cpu.LoadFS(h, fashion.ModelFS(), "top")
	return n, err
}

// once runs the images through the three parts, and returns what the bottom made of them.
func (n *splitNetwork) once(ctx context.Context, cl *client.Client, w io.Writer) (hidden tensor.Tensor, err error) {
	before, err := cl.Info(ctx)
	if err != nil {
		return hidden, err
	}
	begin := time.Now()
	bottom, err := engine.Compute(ctx, n.bottom, nil, n.images)
	if err != nil {
		return hidden, err
	}
	y, err := cl.Compute(ctx, demoTrunk, bottom[0])
	if err != nil {
		return hidden, err
	}
	if n.classes, err = n.classify(ctx, y); err != nil {
		return hidden, err
	}
	took := time.Since(begin)
	after, err := cl.Info(ctx)
	if err != nil {
		return hidden, err
	}
	counted := func(name string) int64 { return after.Counters[name] - before.Counters[name] }
	n.wrong = differing(n.classes, fashion.Predictions())
	same := fmt.Sprintf("all %d are identical to torch's", fashion.Count)
	if n.wrong > 0 {
		same = fmt.Sprintf("%d of %d DIFFER from torch's", n.wrong, fashion.Count)
	}
	right := fashion.Count - differing(n.classes, n.labels)
	fmt.Fprintf(w, "predictions    %s, %.1f %% are right\n", same, 100*float64(right)/fashion.Count)
	fmt.Fprintf(w, "activations    the server counted %d bytes in and %d out\n", counted("received_bytes_total"), counted("sent_bytes_total"))
	fmt.Fprintf(w, "time           %.0f ms through all three\n\n", 1e3*took.Seconds())
	return bottom[0], nil
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

// manyTimes sends the activations through the trunk, and the images through relu, which
// does not change pixels. Each is repeated many times in one tensor that neither side
// ever holds in memory.
func (n *splitNetwork) manyTimes(ctx context.Context, cl *client.Client, w io.Writer, times int, hidden tensor.Tensor) error {
	s, err := cl.Session(ctx)
	if err != nil {
		return err
	}
	var came bytes.Buffer
	classified := func(p []byte) (int, error) {
		came.Write(p)
		for came.Len() >= len(hidden.Data) {
			got, err := n.classify(ctx, tensor.Tensor{Desc: hidden.Desc, Data: came.Next(len(hidden.Data))})
			if err != nil {
				return 0, err
			}
			n.differ += differing(got, n.classes)
		}
		return len(p), nil
	}
	want := n.images.Data // the rest of one copy
	compared := func(p []byte) (int, error) {
		for rest := p; len(rest) > 0; {
			part := min(len(rest), len(want))
			if !bytes.Equal(rest[:part], want[:part]) {
				return 0, errors.New("relu changed pixels")
			}
			if rest, want = rest[part:], want[part:]; len(want) == 0 {
				want = n.images.Data
			}
		}
		return len(p), nil
	}
	if err := ferry(ctx, s, w, "activations", demoTrunk, times, hidden, classified); err != nil {
		return err
	}
	return ferry(ctx, s, w, "pixels", "relu", times, n.images, compared)
}

// ferry sends a tensor that repeats x the given number of times through a model that
// keeps its shape, gives the result to check, and writes how fast that was.
func ferry(ctx context.Context, s *client.Session, w io.Writer, what, model string, times int, x tensor.Tensor, check writerFunc) error {
	rows, size := int64(times)*x.Shape[0], times*len(x.Data)
	desc := tensor.Desc{DType: x.DType, Shape: tensor.Shape{rows, x.Shape[1]}}
	begin := time.Now()
	var first time.Duration
	timed := writerFunc(func(p []byte) (int, error) {
		first = cmp.Or(first, time.Since(begin))
		return check(p)
	})
	copies := make([]io.Reader, times)
	for i := range copies {
		copies[i] = bytes.NewReader(x.Data)
	}
	call, err := s.Call(ctx, client.Request{
		Model: model, Inputs: []client.Input{client.FromReader("x", desc, io.MultiReader(copies...))},
		Results: map[string]client.Sink{"y": client.Writer(func(tensor.Desc) (io.Writer, error) { return timed, nil })},
	})
	if err == nil {
		_, err = call.Wait()
	}
	if err != nil {
		return err
	}
	took := time.Since(begin).Seconds()
	fmt.Fprintf(w, "%-14s %v through %s: all of them compared, %.0f images/s\n", what, desc, model, float64(rows)/took)
	fmt.Fprintf(w, "%-14s %.2f GB/s each way; first result after %.0f ms of %.1f s\n", "", float64(size)/took/1e9, 1e3*first.Seconds(), took)
	return nil
}

// classify runs the top model over rows of activations and returns the class of each.
func (n *splitNetwork) classify(ctx context.Context, y tensor.Tensor) ([]byte, error) {
	out, err := engine.Compute(ctx, n.top, nil, y)
	if err != nil {
		return nil, err
	}
	logits, err := tensor.Slice[float32](out[0])
	if err != nil {
		return nil, err
	}
	var classes []byte
	for row := range slices.Chunk(logits, len(fashion.ClassNames)) {
		classes = append(classes, byte(slices.Index(row, slices.Max(row))))
	}
	return classes, nil
}

// writeNext suggests commands to try next.
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
