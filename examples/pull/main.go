// Command pull keeps tensors in a folder on a server and gets them back: by name,
// by glob, out of a .safetensors file, and from functions that make a tensor when
// somebody asks for it.
//
//	go run ./examples/pull
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/examples/local"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/folder"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

func main() {
	if err := run(context.Background(), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "pull:", err)
		os.Exit(1)
	}
}

// mandelbrot is a source of one's own: a function from the parameters of a pull to
// a tensor. Each element counts the steps in which its point escapes.
var mandelbrot = store.Tensor(func(ctx context.Context, params map[string]string) (tensor.Tensor, error) {
	width, err := count(params, "width", 64)
	if err != nil {
		return tensor.Tensor{}, err
	}
	height, err := count(params, "height", 20)
	if err != nil {
		return tensor.Tensor{}, err
	}
	steps := make([]uint8, width*height)
	for i := range steps {
		if i%width == 0 && ctx.Err() != nil { // nobody waits for it any more
			return tensor.Tensor{}, context.Cause(ctx)
		}
		x, y := float64(i%width)/float64(width), float64(i/width)/float64(height)
		c := complex(-2.2+3*x, -1.2+2.4*y)
		for z := c; steps[i] < math.MaxUint8 && real(z)*real(z)+imag(z)*imag(z) < 4; z = z*z + c {
			steps[i]++
		}
	}
	return tensor.Of(steps, int64(height), int64(width))
})

// count reads a parameter. An error that wraps store.ErrParams is the caller's to
// mend, and the caller reads its text.
func count(params map[string]string, key string, otherwise int) (int, error) {
	text, given := params[key]
	if !given {
		return otherwise, nil
	}
	n, err := strconv.ParseUint(text, 10, 12)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%w: %s is %q; give 1 to 4095", store.ErrParams, key, text)
	}
	return int(n), nil
}

// sines yields float32 values of a sine as they are read: nobody holds all of them.
type sines struct{ next int }

// Read fills p with the next values; the library asks for whole chunks.
func (s *sines) Read(p []byte) (int, error) {
	values := make([]float32, len(p)/4)
	for i := range values {
		values[i] = float32(math.Sin(float64(s.next+i) / 100))
	}
	s.next += len(values)
	t, err := tensor.Of(values)
	return copy(p, t.Data), err
}

func run(ctx context.Context, out io.Writer) (err error) {
	dir, err := os.MkdirTemp("", "tensorferry-pull")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()

	// Whole files in the folder appear as their tensors: this one as weights/bias.
	bias, err := tensor.Of([]float32{1, 2, 3, 4}, 4)
	if err != nil {
		return err
	}
	var file bytes.Buffer
	if err := tensorfile.WriteSafetensors(&file, []tensorfile.Named{{Name: "bias", Tensor: bias}}, nil); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "weights.safetensors"), file.Bytes(), 0o600); err != nil {
		return err
	}
	kept, err := folder.OpenWithFiles(dir, folder.Config{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, kept.Close()) }()
	var functions store.Sources
	if err := errors.Join(functions.Add("mandelbrot", mandelbrot), functions.Add("gen", store.Generator())); err != nil {
		return err
	}
	host := cpu.NewHost(cpu.HostConfig{})
	defer host.Close()
	address, stop, err := local.Serve(host, server.Config{Store: kept, Sources: &functions})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	c, err := client.Dial(address, client.Config{})
	if err != nil {
		return err
	}
	defer c.Close()

	// Push: one tensor out of a slice, one out of a reader.
	images, err := tensor.Of(make([]uint8, 10*28*28), 10, 28, 28)
	if err != nil {
		return err
	}
	for i := range images.Data {
		images.Data[i] = byte(i * i)
	}
	wave := tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{1 << 20}} // 4 MiB
	pushed, err := c.Push(ctx, client.PushRequest{Tensors: []client.Input{
		{Name: "train/images", Desc: images.Desc, Data: images.Data},
		{Name: "train/wave", Desc: wave, Reader: &sines{}},
	}})
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "pushed")
	for _, s := range pushed {
		fmt.Fprintf(out, "  %-14s %-22v %8d bytes  %v  durable: %v\n", s.Name, s.Desc, s.Bytes, s.Digest, s.Durable)
	}

	stored, sources, err := c.List(ctx, "")
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "on the server")
	for _, s := range stored {
		from := "pushed"
		if s.File != "" {
			from = "in " + s.File
		}
		fmt.Fprintf(out, "  %-14s %-22v %8d bytes  %s\n", s.Name, s.Desc, s.Bytes, from)
	}
	fmt.Fprintf(out, "  sources: %v\n", sources)

	// Pull: a name, a glob that matches both of the others, two sources.
	pulled, err := c.Pull(ctx, client.PullRequest{Select: []client.Selection{
		{Name: "weights/bias"},
		{Name: "train/*"},
		{Name: "mandelbrot", Source: true, Params: map[string]string{"width": "60", "height": "16"}},
		{Name: "gen", Source: true, Params: map[string]string{"dtype": "float16", "shape": "1000,64", "seed": "7"}},
	}})
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "pulled")
	got := map[string]client.Summary{}
	for _, s := range pulled {
		got[s.Name] = s
		fmt.Fprintf(out, "  %-14s %-22v %8d bytes  %v\n", s.Name, s.Desc, s.Bytes, s.Digest)
	}

	// Client and server have compared digests; here are the bytes themselves.
	whole := make([]byte, got["train/wave"].Bytes)
	if _, err := io.ReadFull(&sines{}, whole); err != nil {
		return err
	}
	for name, want := range map[string][]byte{"weights/bias": bias.Data, "train/images": images.Data, "train/wave": whole} {
		if !bytes.Equal(got[name].Data, want) {
			return fmt.Errorf("%s came back with other bytes", name)
		}
	}
	fmt.Fprintln(out, "every byte is the one that was sent; mandelbrot, made for this pull:")
	return draw(out, got["mandelbrot"])
}

// draw prints a tensor of counts as a picture.
func draw(out io.Writer, s client.Summary) error {
	const shades = " .:-=+*#%@"
	width := int(s.Shape[1])
	for row := 0; row < len(s.Data); row += width {
		line := make([]byte, width)
		for i, steps := range s.Data[row : row+width] {
			line[i] = shades[min(int(steps)/2, len(shades)-1)]
		}
		if _, err := fmt.Fprintf(out, "  %s\n", bytes.TrimRight(line, " ")); err != nil {
			return err
		}
	}
	return nil
}
