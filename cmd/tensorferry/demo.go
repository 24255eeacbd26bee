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
	var times int64
	var asJSON bool
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
			if times < 1 || times > demoMaxTimes {
				return usage("--times %d: use 1 to %d", times, demoMaxTimes)
			}
			text := c.OutOrStdout()
			if asJSON {
				text = io.Discard
			}
			r, err := demo(c.Context(), at, []string{"--engine", where, "--cuda-driver", driver}, times, text)
			if err == nil && asJSON {
				err = writeJSON(c.OutOrStdout(), r)
			}
			if err != nil {
				return err
			}
			return r.verdict()
		},
	}
	c.Flags().StringVar(&at.server, "server", "", "`address` of a server with the model "+demoTrunk+" (default: start one)")
	at.identityFlags(c)
	c.Flags().StringVar(&where, "engine", autoEngine, "`where` the demo's own server runs the trunk:\nauto, cpu or a device such as cuda:0")
	c.Flags().Int64Var(&times, "times", demoTimes, "how often the images are repeated in one tensor")
	c.Flags().StringVar(&driver, "cuda-driver", os.Getenv("TENSORFERRY_CUDA_DRIVER"), "NVIDIA driver library `file`, as for serve")
	c.Flag("cuda-driver").DefValue = ""
	jsonFlag(c, &asJSON)
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

// demoReport is the result of the demo.
type demoReport struct {
	Server        string  `json:"server"`
	ServerPID     int     `json:"server_pid,omitempty"`
	Device        string  `json:"device,omitempty"` // runs the trunk
	Images        int     `json:"images"`
	Correct       int     `json:"correct"`       // predictions that equal the label
	Identical     int     `json:"identical"`     // predictions that equal torch's
	Seconds       float64 `json:"total_seconds"` // bottom, transfer, trunk, transfer, top
	ReceivedBytes int64   `json:"server_received_bytes"`
	SentBytes     int64   `json:"server_sent_bytes"`

	// Times is how often the activations, which pass through the trunk, and the images,
	// which pass through relu, are repeated in one tensor.
	Times       int64   `json:"times"`
	Activations passage `json:"activations"`
	Pixels      passage `json:"pixels"`
	// Differing counts predictions of repetitions that differ from the first.
	Differing int64 `json:"differing"`
	// Peak memory; absent if the system does not report it, or for a server of --server.
	ClientPeakBytes int64 `json:"client_peak_bytes,omitempty"`
	ServerPeakBytes int64 `json:"server_peak_bytes,omitempty"`
}

// passage describes a tensor that was streamed through a model of the server.
type passage struct {
	Model       string  `json:"model"`
	Tensor      string  `json:"tensor"`
	Bytes       int64   `json:"bytes"` // each way
	FirstResult float64 `json:"first_result_seconds"`
	Total       float64 `json:"total_seconds"`
}

// verdict returns an error unless every prediction equals torch's.
func (r *demoReport) verdict() error {
	switch {
	case r.Identical != r.Images:
		return fmt.Errorf("%d of %d predictions differ from those of torch", r.Images-r.Identical, r.Images)
	case r.Differing > 0:
		return fmt.Errorf("%d of %d repeated predictions differ from the first ones", r.Differing, int64(r.Images)*r.Times)
	}
	return nil
}

// splitNetwork is the client's part of the demo.
type splitNetwork struct {
	bottom, top engine.Model
	images      tensor.Tensor // float32, fashion.Count rows of fashion.Pixels
	labels      []byte
}

// demo runs the demo and writes a readable report to out as it proceeds.
func demo(ctx context.Context, at access, serve []string, times int64, out io.Writer) (*demoReport, error) {
	r := &demoReport{Server: at.server, Images: fashion.Count, Times: times}
	if at.server == "" {
		exe, err := os.Executable()
		if err != nil {
			return nil, err
		}
		child, address, err := startServer(ctx, exe, append(serve, "--demo")...)
		if err != nil {
			return nil, err
		}
		defer func() { _ = child.Stop() }() // its exit status no longer matters
		at = access{server: address}
		r.Server, r.ServerPID = address, child.Process.Pid
	}
	host := cpu.NewHost(cpu.HostConfig{})
	defer host.Close()
	n, err := newSplitNetwork(host)
	if err != nil {
		return nil, err
	}
	cl, err := at.dial(client.Config{})
	if err != nil {
		return nil, err
	}
	defer cl.Close()
	trunk, err := findModel(ctx, cl, demoTrunk, "start it with tensorferry serve --demo")
	if err != nil {
		return nil, err
	}
	r.Device = trunk.GetDevice()
	hidden, classes, err := n.once(ctx, cl, r)
	if err != nil {
		return nil, err
	}
	w := bufio.NewWriter(out) // remembers its first error until Flush
	r.writeOnce(w)
	if err := w.Flush(); err != nil {
		return nil, err
	}
	if err := n.manyTimes(ctx, cl, r, hidden, classes); err != nil {
		return nil, err
	}
	r.ClientPeakBytes = peakOf(os.Getpid())
	if r.ServerPID != 0 {
		r.ServerPeakBytes = peakOf(r.ServerPID)
	}
	r.writeManyTimes(w)
	writeNext(w)
	return r, w.Flush()
}

// startServer runs serve from the tensorferry binary exe on a free loopback port and waits
// until it listens. It ends with this process at the latest; the caller stops it.
func startServer(ctx context.Context, exe string, args ...string) (c *proc.Child, address string, err error) {
	args = append([]string{"serve", "--child", "--listen", "127.0.0.1:0"}, args...)
	return proc.Serve(ctx, exec.CommandContext(ctx, exe, args...))
}

// peakOf returns the peak memory of a running process, or 0 if the system does not report it.
func peakOf(pid int) int64 {
	r, _ := proc.ResidentOf(pid)
	return r.Peak
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
func (n *splitNetwork) once(ctx context.Context, cl *client.Client, r *demoReport) (hidden tensor.Tensor, classes []byte, err error) {
	before, err := cl.Info(ctx)
	if err != nil {
		return hidden, nil, err
	}
	begin := time.Now()
	bottom, err := engine.Compute(ctx, n.bottom, nil, n.images)
	if err != nil {
		return hidden, nil, err
	}
	y, err := cl.Compute(ctx, demoTrunk, bottom[0])
	if err != nil {
		return hidden, nil, err
	}
	if classes, err = n.classify(ctx, y); err != nil {
		return hidden, nil, err
	}
	r.Seconds = time.Since(begin).Seconds()
	after, err := cl.Info(ctx)
	if err != nil {
		return hidden, nil, err
	}
	counted := func(name string) int64 { return after.GetCounters()[name] - before.GetCounters()[name] }
	r.ReceivedBytes, r.SentBytes = counted("received_bytes_total"), counted("sent_bytes_total")
	torch := fashion.Predictions()
	for i, c := range classes {
		if c == n.labels[i] {
			r.Correct++
		}
		if c == torch[i] {
			r.Identical++
		}
	}
	return bottom[0], classes, nil
}

// manyTimes sends the activations through the trunk, and the images through relu, which
// does not change pixels. Each is repeated r.Times times in one tensor that neither side
// ever holds in memory.
func (n *splitNetwork) manyTimes(ctx context.Context, cl *client.Client, r *demoReport, hidden tensor.Tensor, classes []byte) error {
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
			for i, c := range got {
				if c != classes[i] {
					r.Differing++
				}
			}
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
	if r.Activations, err = ferry(ctx, s, demoTrunk, r.Times, hidden, classified); err != nil {
		return err
	}
	r.Pixels, err = ferry(ctx, s, "relu", r.Times, n.images, compared)
	return err
}

// ferry sends a tensor that repeats x the given number of times through a model that
// keeps its shape, and writes the result to w.
func ferry(ctx context.Context, s *client.Session, model string, times int64, x tensor.Tensor, w writerFunc) (passage, error) {
	desc := tensor.Desc{DType: x.DType, Shape: tensor.Shape{times * x.Shape[0], x.Shape[1]}}
	copies := make([]io.Reader, times)
	for i := range copies {
		copies[i] = bytes.NewReader(x.Data)
	}
	begin := time.Now()
	var first time.Duration
	timed := writerFunc(func(p []byte) (int, error) {
		first = cmp.Or(first, time.Since(begin))
		return w(p)
	})
	call, err := s.Call(ctx, client.Request{
		Model: model, Inputs: []client.Input{client.FromReader("x", desc, io.MultiReader(copies...))},
		Results: map[string]client.Sink{"y": client.Writer(func(tensor.Desc) (io.Writer, error) { return timed, nil })},
	})
	if err == nil {
		_, err = call.Wait()
	}
	return passage{model, desc.String(), times * int64(len(x.Data)), first.Seconds(), time.Since(begin).Seconds()}, err
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

func (r *demoReport) writeOnce(w io.Writer) {
	server := r.Server
	if r.ServerPID != 0 {
		server += fmt.Sprintf(", process %d", r.ServerPID)
	}
	if r.Device != "" {
		server += ", " + plain(r.Device)
	}
	fmt.Fprintf(w, "Fashion-MNIST, %d images, a network split in three\n", r.Images)
	fmt.Fprintf(w, "  bottom  784 > 128  here\n  trunk   128 > 128  %s\n  top     128 > 10   here\n\n", server)
	same := fmt.Sprintf("all %d are identical to torch's", r.Images)
	if r.Identical != r.Images {
		same = fmt.Sprintf("%d of %d DIFFER from torch's", r.Images-r.Identical, r.Images)
	}
	fmt.Fprintf(w, "predictions    %s, %.1f %% are right\n", same, 100*float64(r.Correct)/float64(r.Images))
	fmt.Fprintf(w, "activations    the server counted %d bytes in and %d out\n", r.ReceivedBytes, r.SentBytes)
	fmt.Fprintf(w, "time           %.0f ms through all three\n\n", 1e3*r.Seconds)
	fmt.Fprintf(w, "%d times over, as one tensor (some seconds)\n", r.Times)
}

func (r *demoReport) writeManyTimes(w io.Writer) {
	again := "the same predictions each time"
	if r.Differing > 0 {
		again = fmt.Sprintf("%d predictions DIFFER", r.Differing)
	}
	r.Activations.write(w, "activations", fmt.Sprintf("%s, %.0f images/s", again, float64(int64(r.Images)*r.Times)/r.Activations.Total))
	r.Pixels.write(w, "pixels", "every byte compared")
	if r.ClientPeakBytes > 0 {
		fmt.Fprintf(w, "peak memory    % .1f here", decor.SizeB1000(r.ClientPeakBytes))
		if r.ServerPeakBytes > 0 {
			fmt.Fprintf(w, ", % .1f in the server", decor.SizeB1000(r.ServerPeakBytes))
		}
		fmt.Fprintf(w, ", for a tensor of % .1f\n", decor.SizeB1000(r.Pixels.Bytes))
	}
	fmt.Fprintln(w)
}

func (p passage) write(w io.Writer, what, checked string) {
	fmt.Fprintf(w, "%-14s %s through %s: %s\n", what, p.Tensor, p.Model, checked)
	fmt.Fprintf(w, "%-14s %.2f GB/s each way; first result after %.0f ms of %.1f s\n", "", float64(p.Bytes)/p.Total/1e9, 1e3*p.FirstResult, p.Total)
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
