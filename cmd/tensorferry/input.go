package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// readWait is how long an interrupted command waits for the read or write it is in.
const readWait = 100 * time.Millisecond

// rawInput are the flags that say what raw bytes are.
type rawInput struct {
	dtype, shape string
	shaped       func() bool // --shape is given
}

func (r *rawInput) flags(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&r.dtype, "dtype", "", "data `type` of raw input, such as float32")
	f.StringVar(&r.shape, "shape", "", "`shape` of raw input, such as 1000,64; empty is a scalar")
	r.shaped = func() bool { return f.Changed("shape") }
	completeDTypes(c)
}

// given reports whether input is raw.
func (r *rawInput) given() bool { return r.dtype != "" }

// check is for before anything is opened.
func (r *rawInput) check() error {
	switch {
	case r.given() && !r.shaped():
		return usage("--dtype needs --shape; --shape \"\" is a scalar")
	case r.shaped() && !r.given():
		return usage("--shape needs --dtype")
	}
	return nil
}

// parseDesc reads a data type and a shape as they are typed.
func parseDesc(dtype, shape string) (d tensor.Desc, size int64, err error) {
	if d.DType, err = tensor.ParseDataType(dtype); err == nil {
		d.Shape, err = tensor.ParseShape(shape)
	}
	if err == nil {
		size, err = d.Bytes()
	}
	if err != nil {
		return d, 0, usageError{err}
	}
	return d, size, nil
}

// source is a tensor to read. Its Name is the one it has in a file of several.
type source struct {
	client.Input
	title string // for people: stdin, x.npy, or f.safetensors:name
	// rest is what must be at its end when the tensor has been read; nil if that is
	// known already, or if it has none, as a device.
	rest io.Reader
}

// bytes yields the tensor's bytes, once.
func (s *source) bytes() io.Reader {
	if s.Reader != nil {
		return s.Reader
	}
	return bytes.NewReader(s.Data)
}

// inputFile is a file, or stdin, and the tensors to read from it. It is closed when
// their bytes are in no use.
type inputFile struct {
	tensors []*source
	io.Closer
}

// openInput opens what is named by a command's argument: a .npy file, a
// .safetensors file with all its tensors or with the one whose :name stands behind
// it, raw bytes, or "-" for stdin.
func openInput(file string, raw rawInput, stdin io.Reader) (*inputFile, error) {
	path, name, member := strings.Cut(file, ".safetensors:")
	switch {
	case raw.given():
		return openRaw(file, raw, stdin)
	case file == "-":
		in := bufio.NewReaderSize(stdin, 64<<10)
		d, err := tensorfile.ReadNPYHeader(in)
		if err != nil {
			return nil, hinted{fmt.Errorf("stdin: %w", err), "raw bytes need --dtype and --shape"}
		}
		return one(&source{client.FromReader("", d, in), "stdin", in}, nil), nil
	case member:
		return openSafetensors(path+".safetensors", func(n string) bool { return n == name })
	case strings.HasSuffix(file, ".safetensors"):
		return openSafetensors(file, func(string) bool { return true })
	}
	t, c, err := tensorfile.MapNPY(file)
	if err != nil {
		return nil, err
	}
	return one(&source{client.From("", t), file, nil}, c), nil
}

// openOne opens a single tensor.
func openOne(file string, raw rawInput, stdin io.Reader) (*source, io.Closer, error) {
	in, err := openInput(file, raw, stdin)
	if err != nil {
		return nil, nil, err
	}
	if n := len(in.tensors); n != 1 {
		return nil, nil, errors.Join(usage("%s holds %d tensors: say which, as %s:name", file, n, file), in.Close())
	}
	return in.tensors[0], in, nil
}

func one(s *source, c io.Closer) *inputFile {
	if c == nil {
		c = io.NopCloser(nil)
	}
	return &inputFile{[]*source{s}, c}
}

// openSafetensors opens the tensors of a file that are wanted. If none is, one of
// them was named.
func openSafetensors(path string, wanted func(name string) bool) (*inputFile, error) {
	s, err := tensorfile.OpenSafetensors(path)
	if err != nil {
		return nil, err
	}
	in := &inputFile{Closer: s}
	for _, name := range s.Names() {
		if !wanted(name) {
			continue
		}
		t, err := s.Tensor(name)
		if err != nil {
			return nil, errors.Join(err, s.Close())
		}
		src := &source{client.From("", t), path + ":" + name, nil}
		src.Name = name
		in.tensors = append(in.tensors, src)
	}
	if len(in.tensors) == 0 && len(s.Names()) > 0 {
		err := fmt.Errorf("%s: %w of that name", path, tensorfile.ErrNotFound)
		return nil, errors.Join(hinted{err, "tensorferry show " + path + " lists what it holds"}, s.Close())
	}
	return in, nil
}

// describesItself reports whether a file of this name says what it holds.
func describesItself(file string) bool {
	return strings.HasSuffix(file, ".npy") || strings.HasSuffix(file, ".safetensors") || strings.Contains(file, ".safetensors:")
}

// openRaw opens bytes that --dtype and --shape describe.
func openRaw(file string, raw rawInput, stdin io.Reader) (*inputFile, error) {
	if describesItself(file) {
		return nil, usage("%s says itself what it holds; --dtype and --shape are for raw bytes", file)
	}
	desc, size, err := parseDesc(raw.dtype, raw.shape)
	if err != nil {
		return nil, err
	}
	in := one(&source{client.FromReader("", desc, stdin), "stdin", stdin}, nil)
	f, ok := stdin.(*os.File)
	if file != "-" {
		if f, err = os.Open(file); err != nil {
			return nil, err
		}
		in, ok = one(&source{client.FromReader("", desc, f), file, f}, f), true
	}
	if !ok {
		return in, nil
	}
	s := in.tensors[0]
	info, err := f.Stat()
	if err != nil {
		return nil, errors.Join(err, in.Close())
	}
	switch {
	case info.Mode()&os.ModeCharDevice != 0:
		s.rest = nil
	case info.Mode().IsRegular():
		at, err := f.Seek(0, io.SeekCurrent)
		if err != nil {
			return nil, errors.Join(err, in.Close())
		}
		if left := info.Size() - at; left > size { // one that is shorter may still grow
			return nil, errors.Join(fmt.Errorf("%s holds %d bytes, %v has %d", s.title, left, desc, size), in.Close())
		}
		s.rest = nil
	}
	return in, nil
}

// atEnd fails if more than the tensor comes. A pipe that stays open and says no
// more is not waited for: the goroutine then ends with the process.
func (s *source) atEnd() error {
	if s.rest == nil {
		return nil
	}
	more := make(chan bool, 1)
	go func() {
		n, _ := io.ReadFull(s.rest, make([]byte, 1)) // how it ends matters no more
		more <- n > 0
	}()
	select {
	case surplus := <-more:
		if surplus {
			return fmt.Errorf("%s goes on after the bytes of %v", s.title, s.Desc)
		}
	case <-time.After(readWait):
	}
	return nil
}

// interruptible waits for f, or little longer than ctx: f may be in a read or write
// that blocks for good, as of stdin. The goroutine it starts then ends with the
// process.
func interruptible(ctx context.Context, f func() error) error {
	ended := make(chan error, 1)
	go func() { ended <- f() }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-ended:
		return err
	case <-time.After(readWait):
		return context.Cause(ctx)
	}
}
