// Command goclient is the Go client in the benchmark of the Python package
// (bench/python): package client as its users have it, with every default. It reads
// lines such as "echo 268435456 1", a model, the bytes of a tensor and how many calls, and
// answers each with the median seconds of a call. It refuses to judge.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/tensor"
)

// pageValues are the float32s of a page. A value of each is new in each call.
const pageValues = 1024

func main() {
	if err := run(os.Args[1:], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "goclient:", err)
		os.Exit(1)
	}
}

func run(args []string, in io.Reader, out io.Writer) (err error) {
	if len(args) != 1 {
		return fmt.Errorf("%q; give the address of a server", args)
	}
	c, err := client.Dial(args[0], client.Config{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	fmt.Fprintln(out, "ready")
	var source []float32
	for lines := bufio.NewScanner(in); lines.Scan(); {
		var model string
		var size, count int
		if _, err := fmt.Sscan(lines.Text(), &model, &size, &count); err != nil {
			return fmt.Errorf("%q: %w", lines.Text(), err)
		}
		if len(source) != size/4 {
			source = make([]float32, size/4)
			for i := range source {
				source[i] = float32(i)
			}
		}
		times := make([]time.Duration, count)
		for i := range times {
			if times[i], err = measure(c, model, source); err != nil {
				return err
			}
		}
		if _, err := fmt.Fprintln(out, bench.Quantile(times, 0.5).Seconds()); err != nil {
			return err
		}
	}
	return nil
}

// measure times one call, and then compares its result.
func measure(c *client.Client, model string, source []float32) (time.Duration, error) {
	for i := 0; i < len(source); i += pageValues {
		source[i]++
	}
	start := time.Now()
	x, err := tensor.Of(source, int64(len(source)))
	if err != nil {
		return 0, err
	}
	y, err := c.Compute(context.Background(), model, x)
	took := time.Since(start)
	if err != nil {
		return 0, err
	}
	want := x.Data
	if model == "sink" {
		want = binary.LittleEndian.AppendUint64(nil, uint64(len(x.Data)))
	}
	if !bytes.Equal(y.Data, want) {
		return 0, fmt.Errorf("model %s computes something else", model)
	}
	return took, nil
}
