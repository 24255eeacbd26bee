// Package tensorfile reads and writes tensors as .npy and .safetensors files, and reads
// .npz files.
//
// It is strict: a file that says one thing twice, leaves a hole, hides bytes or
// lies about a length is refused, and no allocation is larger than what has been
// checked. It never runs or unpickles anything. A byte order
// or a layout of .npy other than the wire's is converted while it is read where the
// caller asks for it, and else an error that says what to do.
// Anyone may call it. Files are mapped read-only: tensors of a mapped file are
// lent until it is closed.
package tensorfile

import (
	"errors"
	"fmt"
	"io"
	"os"
)

// Errors that callers decide on. Every error about a file's content wraps one of
// them; the tensor package's errors are wrapped beside it where they are the cause.
var (
	// ErrFormat is wrapped when a file, or what is to become one, is malformed.
	ErrFormat = errors.New("tensorfile: malformed")
	// ErrUnsupported is wrapped when a file is well formed but holds what a
	// tensor here cannot be; the text says how to convert it.
	ErrUnsupported = errors.New("tensorfile: not supported")
	// ErrNotFound is wrapped when a file holds no tensor of the name asked for.
	ErrNotFound = errors.New("tensorfile: no such tensor")
	// ErrClosed is returned when the file has been closed.
	ErrClosed = errors.New("tensorfile: closed")
)

// firstError keeps the first error of a parser of a format.
type firstError struct {
	format string
	err    error
}

func (e *firstError) fail(text string, args ...any) { e.refuse(ErrFormat, text, args...) }

func (e *firstError) refuse(kind error, text string, args ...any) {
	if e.err == nil {
		e.err = fmt.Errorf("%w: "+e.format+": "+text, append([]any{kind}, args...)...)
	}
}

// readHeader fills b with a part of the header of a format.
func readHeader(r io.Reader, b []byte, format string) error {
	switch _, err := io.ReadFull(r, b); {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("%w: %s: the file ends within its header: %w", ErrFormat, format, io.ErrUnexpectedEOF)
	case err != nil:
		return fmt.Errorf("tensorfile: read %s header: %w", format, err)
	}
	return nil
}

// openFile opens a regular file and returns its size in bytes. It looks before it
// opens: opening a named pipe would wait for a writer, and a pipe has no size.
func openFile(path string) (*os.File, int, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, 0, fmt.Errorf("tensorfile: %w", err)
	}
	if info.IsDir() {
		return nil, 0, fmt.Errorf("%w: %s is a directory", ErrUnsupported, path)
	}
	if !info.Mode().IsRegular() {
		return nil, 0, fmt.Errorf("%w: %s is not a regular file", ErrUnsupported, path)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, 0, fmt.Errorf("tensorfile: %w", err)
	}
	if info, err = f.Stat(); err == nil && int64(int(info.Size())) != info.Size() {
		err = fmt.Errorf("%s has %d bytes, more than this machine can address", path, info.Size())
	}
	if err != nil {
		return nil, 0, errors.Join(fmt.Errorf("tensorfile: %w", err), f.Close())
	}
	return f, int(info.Size()), nil
}

// mapAfter maps a file whose header readHeader reads, up to the first byte of the data,
// which are lent until closeMap runs. The header is read and not mapped, because somebody
// may shorten the file meanwhile: reading then fails, but touching a page that is gone
// kills the process.
func mapAfter(path string, readHeader func(r io.Reader, size int64) error) (data []byte, closeMap func() error, err error) {
	f, size, err := openFile(path)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	if err := readHeader(f, int64(size)); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	begin, err := f.Seek(0, io.SeekCurrent)
	if err != nil {
		return nil, nil, fmt.Errorf("tensorfile: %w", err)
	}
	data, closeMap, err = mapFile(f, size)
	if err != nil {
		return nil, nil, err
	}
	return data[min(begin, int64(size)):], closeMap, nil // a file that grows may have a header longer than size
}

// Map maps a whole file read-only. Its bytes are lent until the closer is closed.
func Map(path string) ([]byte, io.Closer, error) {
	data, closeMap, err := mapAfter(path, func(io.Reader, int64) error { return nil })
	return data, closer(closeMap), err
}
