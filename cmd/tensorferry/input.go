package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
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

// nameOf parts [NAME=]FILE, or [NAME=] and a folder. The whole is the file, without a
// name, if there is one that is called so.
func nameOf(text string) (name, file string, named bool) {
	name, file, named = strings.Cut(text, "=")
	if !named || isThere(text) {
		return "", text, false
	}
	return name, file, true
}

// isThere reports whether there is the file that an argument names.
func isThere(file string) bool {
	if path, _, member := strings.Cut(file, ".safetensors:"); member {
		file = path + ".safetensors"
	}
	_, err := os.Stat(file)
	return err == nil
}

// neither is the error of opening the file that nameOf has parted from a name, with a
// hint if it is not there: the = may belong to the file.
func neither(text, file string, named bool, err error) error {
	if !named || !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return hinted{err, fmt.Sprintf("there is no file %q, and none %q either", file, text)}
}

// openInput opens what is named by a command's argument: a .npy file, a
// .safetensors file with all its tensors or with the one whose :name stands behind
// it, raw bytes, or "-" for stdin. It waits for what a pipe says of itself, or little
// longer than ctx.
func openInput(ctx context.Context, file string, raw rawInput, stdin io.Reader) (*inputFile, error) {
	opened := make(chan *inputFile, 1)
	err := interruptible(ctx, func() error {
		in, err := openFile(file, raw, stdin)
		opened <- in
		return err
	})
	if err != nil {
		return nil, err
	}
	return <-opened, nil
}

func openFile(file string, raw rawInput, stdin io.Reader) (*inputFile, error) {
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
		size, err := d.Bytes()
		if err != nil {
			return nil, fmt.Errorf("stdin: %w", err)
		}
		s, err := pipedSource("stdin", d, size, in)
		if err != nil {
			return nil, err
		}
		return one(s, nil), nil
	case member:
		return openSafetensors(path+".safetensors", name)
	case strings.HasSuffix(file, ".safetensors"):
		return openSafetensors(file)
	}
	t, c, err := tensorfile.MapNPY(file)
	if err != nil {
		return nil, err
	}
	return one(&source{client.From("", t), file}, c), nil
}

// openOne opens a single tensor.
func openOne(ctx context.Context, file string, raw rawInput, stdin io.Reader) (*source, io.Closer, error) {
	in, err := openInput(ctx, file, raw, stdin)
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

// openSafetensors opens the tensors of a file, or only that of a name.
func openSafetensors(path string, only ...string) (*inputFile, error) {
	s, err := tensorfile.OpenSafetensors(path)
	if err != nil {
		return nil, err
	}
	names := s.Names()
	if len(only) > 0 {
		names = only
	}
	in := &inputFile{Closer: s}
	for _, name := range names {
		t, err := s.Tensor(name)
		if errors.Is(err, tensorfile.ErrNotFound) {
			err = hinted{fmt.Errorf("%s: %w: %q", path, tensorfile.ErrNotFound, name), "tensorferry show " + path + " lists what it holds"}
		}
		if err != nil {
			return nil, errors.Join(err, s.Close())
		}
		src := &source{client.From("", t), path + ":" + name}
		src.Name = name
		in.tensors = append(in.tensors, src)
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
	title, r := "stdin", stdin
	var c io.Closer
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		title, r, c = file, f, f
	}
	in := one(&source{client.FromReader("", desc, r), title}, c)
	known, err := endKnown(r, title, desc, size)
	if err == nil && !known {
		in.tensors[0], err = pipedSource(title, desc, size, r)
	}
	if err != nil {
		return nil, errors.Join(err, in.Close())
	}
	return in, nil
}

// endKnown reports whether nothing has to be found out about where raw bytes end: a
// device has no end, and of a regular file the size says it.
func endKnown(r io.Reader, title string, d tensor.Desc, size int64) (bool, error) {
	f, ok := r.(*os.File)
	if !ok {
		return false, nil
	}
	info, err := f.Stat()
	if err != nil {
		return false, err
	}
	if !info.Mode().IsRegular() {
		return info.Mode()&os.ModeCharDevice != 0, nil
	}
	at, err := f.Seek(0, io.SeekCurrent)
	if left := info.Size() - at; err == nil && left > size { // one that is shorter may still grow
		err = fmt.Errorf("%s holds %d bytes, %v has %d", title, left, d, size)
	}
	return true, err
}

// forCall makes s the input of a call or a push, which know it by another name: when a
// reader ends early, its error says whose end it was.
func (s *source) forCall(port, name string) {
	s.Port, s.Name = port, name
	if s.Reader == nil {
		return
	}
	if size, err := s.Desc.Bytes(); err == nil {
		s.Reader = &ending{s.Reader, s.title, size, size}
	}
}

// ending is a reader of so many bytes.
type ending struct {
	r          io.Reader
	title      string
	size, left int64
}

func (e *ending) Read(p []byte) (int, error) {
	n, err := e.r.Read(p)
	e.left -= int64(n)
	if errors.Is(err, io.EOF) && e.left > 0 {
		err = fmt.Errorf("%s ended after %d of %d bytes", e.title, e.size-e.left, e.size)
	}
	return n, err
}

// pipedSource is a tensor that r brings. Its last byte comes only when it is known
// that no more follows: whoever reads the tensor to its end never takes the beginning
// of something for the whole.
func pipedSource(title string, d tensor.Desc, size int64, r io.Reader) (*source, error) {
	atEnd := func() error {
		if more(r) {
			return fmt.Errorf("%s goes on after the bytes of %v", title, d)
		}
		return nil
	}
	if size == 0 { // nobody reads it
		return &source{client.FromReader("", d, r), title}, atEnd()
	}
	return &source{client.FromReader("", d, &heldBack{r: r, left: size, verdict: atEnd}), title}, nil
}

// more reports whether r has another byte. A pipe that stays open and says no more is
// not waited for: the goroutine then ends with the process.
func more(r io.Reader) bool {
	follows := make(chan bool, 1)
	go func() {
		n, _ := io.ReadFull(r, make([]byte, 1)) // how it ends matters no more
		follows <- n > 0
	}()
	select {
	case f := <-follows:
		return f
	case <-time.After(readWait):
		return false
	}
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
