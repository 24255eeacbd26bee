package main

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// target is where a result is written: stdout, a device or pipe, or a file that is
// complete or absent.
type target struct {
	path string // as it was typed
	raw  bool
	out  io.Writer

	special bool     // path is there and no file: it is opened as it is
	real    string   // the file behind every symbolic link
	temp    *os.File // becomes real in the end; nil if there is none
	file    *os.File // of a special path, once it is open
}

// newTarget finds out what path is and makes sure that it can be written, before
// there is a call. The caller commits or abandons it.
func newTarget(path string, raw bool, stdout io.Writer) (*target, error) {
	t := &target{path: path, raw: raw, out: stdout, real: "-"}
	if path == "-" {
		return t, nil
	}
	if path == "" {
		return nil, usage("--output names no file")
	}
	if strings.HasSuffix(path, ".safetensors") || strings.Contains(path, ".safetensors:") {
		return nil, usage("--output %s: results are .npy, or raw bytes with --raw", path)
	}
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if _, err := os.Lstat(path); err == nil {
			return nil, fmt.Errorf("--output %s is a symbolic link to nothing", path)
		}
		dir, err := filepath.EvalSymlinks(filepath.Dir(path))
		if err != nil {
			return nil, t.named(err)
		}
		t.real = filepath.Join(dir, filepath.Base(path))
		return t, t.makeTemp(nil)
	case err != nil:
		return nil, t.named(err)
	case info.IsDir():
		return nil, usage("--output %s is a folder", path)
	case isFile(stdout, info): // such as /dev/stdout
		return t, nil
	case !info.Mode().IsRegular():
		t.special, t.real = true, ""
		return t, nil
	}
	if t.real, err = filepath.EvalSymlinks(path); err != nil {
		return nil, t.named(err)
	}
	old, err := os.OpenFile(t.real, os.O_WRONLY, 0) // may it be written?
	if err != nil {
		return nil, t.named(err)
	}
	return t, errors.Join(t.makeTemp(info), old.Close())
}

// isFile reports whether w is the open file that info tells of.
func isFile(w io.Writer, info fs.FileInfo) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	own, err := f.Stat()
	return err == nil && os.SameFile(own, info)
}

// makeTemp makes the file that the result goes to first, with the mode of the file
// that it is to replace, if there is one.
func (t *target) makeTemp(old fs.FileInfo) error {
	f, err := os.OpenFile(filepath.Join(filepath.Dir(t.real), ".tensorferry-"+rand.Text()), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return t.named(err)
	}
	t.temp, t.out = f, f
	if old != nil {
		if err := f.Chmod(old.Mode().Perm()); err != nil {
			t.abandon()
			return t.named(err)
		}
	}
	return nil
}

// open begins the result. It may block, as opening a pipe does without a reader.
func (t *target) open(d tensor.Desc) (io.Writer, error) {
	if t.special {
		f, err := os.OpenFile(t.path, os.O_WRONLY, 0)
		if err != nil {
			return nil, t.named(err)
		}
		t.file, t.out = f, f
	}
	if t.raw {
		return t, nil
	}
	err := tensorfile.WriteNPYHeader(t, d)
	if errors.Is(err, tensorfile.ErrUnsupported) {
		err = hinted{fmt.Errorf("--output %s: .npy has no type for %v", t.path, d.DType), "--raw writes the bytes as they are"}
	}
	return t, err
}

func (t *target) Write(p []byte) (int, error) {
	n, err := t.out.Write(p)
	return n, t.named(err)
}

// commit ends a result that is complete.
func (t *target) commit() error {
	if t.file != nil {
		return t.named(t.file.Close())
	}
	if t.temp == nil {
		return nil
	}
	f := t.temp
	t.temp = nil
	err := f.Close()
	if err == nil {
		err = os.Rename(f.Name(), t.real)
	}
	if err != nil {
		_ = os.Remove(f.Name()) // that the result is not there is said already
	}
	return t.named(err)
}

// abandon leaves nothing of a result that was not committed. A special file may be
// in the middle of being opened; it is closed with the process.
func (t *target) abandon() {
	if t.temp != nil {
		_ = t.temp.Close() // it is removed anyway
		_ = os.Remove(t.temp.Name())
		t.temp = nil
	}
}

// named says which output failed, by the name that its user knows.
func (t *target) named(err error) error {
	if err == nil {
		return nil
	}
	var p *fs.PathError
	var l *os.LinkError
	switch {
	case errors.As(err, &p):
		err = p.Err
	case errors.As(err, &l):
		err = l.Err
	}
	return fmt.Errorf("--output %s: %w", t.path, err)
}
