package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// source is an input and where it comes from.
type source struct {
	client.Input
	name string
	io.Closer
	// rest is what must be at its end when the tensor has been read; nil if that is
	// known already, or if it has none, as a device.
	rest io.Reader
}

// openInput opens one input. It is closed when its bytes are in no use.
func openInput(file string, o runOptions, stdin io.Reader) (*source, error) {
	switch path, name, member := strings.Cut(file, ".safetensors:"); {
	case o.dtype != "":
		return openRaw(file, o, stdin)
	case file == "-":
		in := bufio.NewReaderSize(stdin, 64<<10)
		d, err := tensorfile.ReadNPYHeader(in)
		if err != nil {
			return nil, hinted{fmt.Errorf("stdin: %w", err), "raw bytes need --dtype and --shape"}
		}
		return &source{client.FromReader("", d, in), "stdin", io.NopCloser(nil), in}, nil
	case member:
		s, err := tensorfile.OpenSafetensors(path + ".safetensors")
		if err != nil {
			return nil, err
		}
		t, err := s.Tensor(name)
		if err != nil {
			return nil, errors.Join(err, s.Close())
		}
		return &source{client.From("", t), file, s, nil}, nil
	case strings.HasSuffix(file, ".safetensors"):
		return nil, usage("--input %s: say which tensor, as %s:name", file, file)
	}
	t, c, err := tensorfile.MapNPY(file)
	if err != nil {
		return nil, err
	}
	return &source{client.From("", t), file, c, nil}, nil
}

// openRaw opens bytes that --dtype and --shape describe.
func openRaw(file string, o runOptions, stdin io.Reader) (*source, error) {
	if strings.HasSuffix(file, ".npy") || strings.HasSuffix(file, ".safetensors") || strings.Contains(file, ".safetensors:") {
		return nil, usage("--input %s says itself what it holds; --dtype and --shape are for raw bytes", file)
	}
	d, err := tensor.ParseDataType(o.dtype)
	if err != nil {
		return nil, usageError{err}
	}
	shape, err := tensor.ParseShape(o.shape)
	if err != nil {
		return nil, usageError{err}
	}
	desc := tensor.Desc{DType: d, Shape: shape}
	size, err := desc.Bytes()
	if err != nil {
		return nil, usageError{err}
	}
	s := &source{client.FromReader("", desc, stdin), "stdin", io.NopCloser(nil), stdin}
	f, ok := stdin.(*os.File)
	if file != "-" {
		if f, err = os.Open(file); err != nil {
			return nil, err
		}
		s, ok = &source{client.FromReader("", desc, f), file, f, f}, true
	}
	if !ok {
		return s, nil
	}
	info, err := f.Stat()
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	switch {
	case info.Mode()&os.ModeCharDevice != 0:
		s.rest = nil
	case info.Mode().IsRegular():
		at, err := f.Seek(0, io.SeekCurrent)
		if err != nil {
			return nil, errors.Join(err, s.Close())
		}
		if left := info.Size() - at; left > size { // one that is shorter may still grow
			return nil, errors.Join(fmt.Errorf("%s holds %d bytes, %v has %d", s.name, left, desc, size), s.Close())
		}
		s.rest = nil
	}
	return s, nil
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
			return fmt.Errorf("%s goes on after the bytes of %v", s.name, s.Desc)
		}
	case <-time.After(readWait):
	}
	return nil
}
