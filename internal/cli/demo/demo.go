// Package demo runs networks that are split between this process and a server, and compares what
// they write and predict with what they do unsplit, and with torch.
package demo

import (
	"bufio"
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

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/examples/fashion"
	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/files"
	"github.com/tensorferry/tensorferry/internal/cli/moving"
	"github.com/tensorferry/tensorferry/internal/proc"
	"github.com/tensorferry/tensorferry/tensor"
)

// The models that the demo needs of a server.
const (
	textTrunk  = "text-trunk"
	imageTrunk = "fashion-trunk"
)

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
	var device string // of imageTrunk
	for _, name := range []string{textTrunk, imageTrunk} {
		m, err := moving.FindModel(ctx, cl, name, "start it with tensorferry serve --demo")
		if err != nil {
			return err
		}
		device = cmp.Or(m.Device, "cpu")
	}
	w := bufio.NewWriter(out) // remembers its first error
	fmt.Fprintf(w, "A network of 4 blocks that has read Sherlock Holmes, split in three\n")
	fmt.Fprintf(w, "  bottom  block 1         here\n  trunk   blocks 2 and 3  %s\n  top     block 4         here\n\n", server)
	fmt.Fprintf(w, "%-*s  %s\n", columnWidth, "SPLIT", "NOT SPLIT")
	_ = w.Flush() // some text before the work; an error comes back from the last one
	report, err := write(ctx, cl, &columns{w: w, live: files.IsTerminal(out)})
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "\ntext           %s\n", report)
	classes, took, err := classify(ctx, cl)
	if err != nil {
		return err
	}
	wrong := differing(classes, fashion.Predictions())
	_, labels := fashion.Images()
	right := fashion.Count - differing(classes, labels)
	fmt.Fprintf(w, "images         %d of %d are identical to torch's, %.1f %% are right; %.0f ms, trunk on %s\n",
		fashion.Count-wrong, fashion.Count, 100*float64(right)/fashion.Count, 1e3*took.Seconds(), display.Plain(device))
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
	y, err := cl.Compute(ctx, imageTrunk, hidden[0])
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
