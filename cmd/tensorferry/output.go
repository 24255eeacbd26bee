package main

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/tensorferry/tensorferry/internal/torchsave"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// errJSONOutput is the error of a command that would print two things to stdout.
var errJSONOutput = usage("--json prints to stdout; name a file with --output")

// output is where a command writes tensors.
type output interface {
	// begin writes the headers of tensors, with what a model file has beside them, and
	// returns a writer for the bytes of each. It is called once.
	begin(tensors []tensorfile.Entry, beside tensorfile.Document) ([]*tensorWriter, error)
	commit() error
	abandon()
}

// target is an output: stdout, a device or pipe, or a file that is complete or absent. If
// its name ends in .safetensors, .pt or .pth, it has this format; otherwise it holds one
// tensor as .npy or raw bytes.
type target struct {
	path string // as typed
	raw  bool
	out  io.Writer

	special bool     // path exists and is not a regular file: it is written in place
	real    string   // path with symbolic links resolved
	temp    *os.File // renamed to real by commit; nil if there is none

	writers []*tensorWriter // nil until begin
	bare    bool            // a PyTorch file is of one tensor, and not of a dict
	parts   *torchsave.Parts
}

// newTarget checks what path is and that it can be written, before a call begins. The
// caller commits or abandons the target.
func newTarget(path string, raw bool, stdout io.Writer) (*target, error) {
	t := &target{path: path, raw: raw, out: stdout, real: "-"}
	switch {
	case path == "-":
		if isTerminal(stdout) {
			return nil, usage("stdout is a terminal; name a file with --output or use a pipe")
		}
		return t, nil
	case path == "":
		return nil, usage("--output must not be empty")
	case strings.HasSuffix(path, arraysSuffix):
		return nil, usage("--output %s: .npz files are not supported; name a .safetensors file or, for one tensor, a .npy file", path)
	case strings.Contains(path, ".safetensors:"):
		return nil, usage("--output %s: an output is a whole file; omit the name after .safetensors", path)
	case raw && describesItself(path):
		return nil, usage("--output %s: --raw does not fit this extension; choose another", path)
	}
	if f := formatOf(path); f.name != "" {
		return nil, usage("--output %s: %s files are not supported; name a .npy, .safetensors or .pt file", path, f.name)
	}
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if _, err := os.Lstat(path); err == nil {
			return nil, fmt.Errorf("--output %s is a dangling symbolic link; remove it", path)
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
	old, err := os.OpenFile(t.real, os.O_WRONLY, 0) // checks the permission
	if err != nil {
		return nil, t.named(err)
	}
	return t, errors.Join(t.makeTemp(info), old.Close())
}

// isFile reports whether w is the file that info describes.
func isFile(w io.Writer, info fs.FileInfo) bool {
	f, _ := w.(*os.File)
	own, err := f.Stat() // fails for what is not a file
	return err == nil && os.SameFile(own, info)
}

// makeTemp creates the temporary file, with the mode of the file that it replaces, if any.
func (t *target) makeTemp(old fs.FileInfo) error {
	f, err := os.OpenFile(filepath.Join(filepath.Dir(t.real), ".tensorferry-"+rand.Text()), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if old != nil && unwritable(err) { // the folder is, and the file is not
		f, err = os.CreateTemp("", ".tensorferry-")
	}
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

// begin implements output. The writers of a .safetensors or PyTorch file may be used in any
// order and concurrently; other outputs take one tensor. begin may block, because opening a
// pipe waits for its reader.
func (t *target) begin(tensors []tensorfile.Entry, beside tensorfile.Document) ([]*tensorWriter, error) {
	whole, torch := strings.HasSuffix(t.path, tensorfile.FileSuffix), isTorch(t.path)
	if len(tensors) != 1 && (!whole && !torch || t.temp == nil) {
		return nil, usage("--output %s takes one tensor, not %d; use a .safetensors or .pt file for several", t.path, len(tensors))
	}
	if t.special {
		f, err := os.OpenFile(t.path, os.O_WRONLY, 0)
		if err != nil {
			return nil, t.named(err)
		}
		t.out = f
	}
	writers := make([]*tensorWriter, len(tensors))
	for i, n := range tensors {
		size, err := n.Desc.Bytes()
		if err != nil {
			return nil, t.named(err)
		}
		writers[i] = &tensorWriter{Entry: n, target: t, left: size, to: t.out}
	}
	var err error
	switch {
	case whole:
		order := slices.SortedFunc(slices.Values(writers), func(a, b *tensorWriter) int { return tensorfile.Order(a.Entry, b.Entry) })
		var header []byte
		header, err = tensorfile.SafetensorsHeader(each(order, func(w *tensorWriter) tensorfile.Entry { return w.Entry }), beside.Common())
		if err == nil {
			_, err = t.out.Write(header)
		}
		off := int64(len(header))
		for _, w := range order {
			if t.temp != nil { // other outputs have one tensor
				w.to = io.NewOffsetWriter(t.temp, off)
			}
			off += w.left
		}
	case torch:
		if t.parts, err = torchsave.NewParts(tensors, t.bare); err != nil {
			break
		}
		for i, w := range writers {
			if t.temp != nil {
				w.to = io.NewOffsetWriter(t.temp, t.parts.Offset(i))
			}
		}
		_, err = t.out.Write(t.parts.Gap(0, nil))
	case !t.raw:
		err = tensorfile.WriteNPYHeader(t.out, tensors[0].Desc)
		if errors.Is(err, tensorfile.ErrUnsupported) {
			err = hinted{err, "or use --raw, which writes the bytes as they are"}
		}
	}
	if err != nil {
		return nil, t.named(err)
	}
	t.writers = writers
	return writers, nil
}

// changed is the error for a tensor that is not what the output has begun with.
const changed = "tensor %q has changed since it was listed; try again"

// open begins an output of one tensor, and shows its progress.
func (t *target) open(name string, d tensor.Desc, bars *progressBars) (io.Writer, error) {
	if len(t.writers) > 0 { // an attempt before this one has opened it
		if w := t.writers[0]; w.Name == name && w.Desc.Equal(d) {
			return w, nil
		}
		return nil, fmt.Errorf(changed, name)
	}
	t.bare = true
	writers, err := t.begin([]tensorfile.Entry{{Name: name, Desc: d}}, tensorfile.Document{})
	if err != nil {
		return nil, err
	}
	writers[0].bar = bars.tensor(name, d)
	return writers[0], nil
}

// tensorWriter takes the bytes of one tensor, in order. It belongs to one goroutine.
type tensorWriter struct {
	tensorfile.Entry
	target *target
	left   int64 // bytes to come
	to     io.Writer
	crc    uint32 // of what was written of a PyTorch file
	bar    *bar
}

func (w *tensorWriter) Write(p []byte) (int, error) {
	if int64(len(p)) > w.left {
		return 0, fmt.Errorf("--output %s: too many bytes for tensor %q", w.target.path, w.Name)
	}
	n, err := w.to.Write(p)
	w.left -= int64(n)
	if w.target.parts != nil {
		w.crc = crc32.Update(w.crc, crc32.IEEETable, p[:n])
	}
	_, _ = w.bar.Write(p[:n]) // it never fails
	return n, w.target.named(err)
}

func (t *target) commit() error {
	if t.writers == nil {
		return fmt.Errorf("--output %s: nothing was written", t.path)
	}
	for _, w := range t.writers {
		if w.left > 0 {
			return fmt.Errorf("--output %s: tensor %q is missing its last %d bytes", t.path, w.Name, w.left)
		}
	}
	if err := t.fillGaps(); err != nil {
		return t.named(err)
	}
	if f, ok := t.out.(*os.File); ok && t.special {
		return t.named(f.Close())
	}
	if t.temp == nil {
		return nil
	}
	err := t.temp.Close()
	if err == nil {
		err = t.replace()
	}
	return t.named(err)
}

// unwritable reports whether a folder does not let a file of it be replaced: one that may not be
// changed, or has the file mounted into it, as a container may.
func unwritable(err error) bool {
	return errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) || errors.Is(err, syscall.EBUSY) || errors.Is(err, syscall.EXDEV)
}

// replace puts the whole temporary file in the place of the old one.
func (t *target) replace() error {
	why := os.Rename(t.temp.Name(), t.real)
	if !unwritable(why) {
		return why
	}
	from, err := os.Open(t.temp.Name())
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.OpenFile(t.real, os.O_WRONLY|os.O_TRUNC, 0)
	if err == nil {
		_, err = io.Copy(to, from)
		err = errors.Join(err, to.Close())
	}
	if kept := t.temp.Name(); err != nil {
		t.temp = nil
		return fmt.Errorf("%w; the whole result is in %s", err, kept)
	}
	fmt.Fprintf(os.Stderr, "tensorferry: --output %s was written in place: %v\n", t.path, why.(*os.LinkError).Err) //nolint:errorlint // what Rename returns
	return os.Remove(t.temp.Name())
}

// fillGaps writes what a PyTorch file has between and behind its tensors: their checksums.
func (t *target) fillGaps() (err error) {
	if t.parts == nil {
		return nil
	}
	crcs := each(t.writers, func(w *tensorWriter) uint32 { return w.crc })
	for i := 1; i <= len(crcs) && err == nil; i++ {
		gap, at := t.parts.Gap(i, crcs), t.parts.Offset(i)
		if i < len(crcs) {
			at -= int64(len(gap))
		}
		if t.temp != nil {
			_, err = t.temp.WriteAt(gap, at)
		} else { // behind the only tensor
			_, err = t.out.Write(gap)
		}
	}
	return err
}

// abandon removes what was not committed. A pipe that is being opened stays until the exit.
func (t *target) abandon() {
	if t.temp != nil {
		_ = t.temp.Close() // it may be closed already, and renamed
		_ = os.Remove(t.temp.Name())
	}
}

func (t *target) named(err error) error { return outputError(t.path, err) }

// outputError adds the output's name, as typed, to an error.
func outputError(path string, err error) error {
	if err == nil {
		return nil
	}
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		err = p.Err
	} else if l, ok := errors.AsType[*os.LinkError](err); ok {
		err = l.Err
	}
	return fmt.Errorf("--output %s: %w", path, err)
}

// folderTarget is a folder for a model of several files. It is complete or absent.
type folderTarget struct {
	path     string // as typed, cleaned
	temp     string // renamed to path by commit or, if path exists, what is in it is moved there
	document tensorfile.Document
	files    []*target
}

// newFolderTarget checks that the folder is new or empty and can be created, before
// anything is pulled. The caller commits or abandons the target.
func newFolderTarget(path string) (*folderTarget, error) {
	t := &folderTarget{path: filepath.Clean(path)}
	entries, err := os.ReadDir(t.path)
	if len(entries) > 0 {
		return nil, usage("--output %s: the folder is not empty; use a new folder or a file", path)
	}
	dir := t.path // it may be mounted, so that it cannot be replaced
	if errors.Is(err, fs.ErrNotExist) {
		dir, err = filepath.Dir(t.path), nil
	}
	if err == nil {
		t.temp = filepath.Join(dir, ".tensorferry-"+rand.Text())
		err = os.Mkdir(t.temp, 0o777)
	}
	return t, outputError(t.path, err)
}

// begin begins each file of the model; it implements output.
func (t *folderTarget) begin(tensors []tensorfile.Entry, beside tensorfile.Document) ([]*tensorWriter, error) {
	t.document = beside
	if t.document.Index == "" {
		return nil, usage("--output %s is a folder, which is only for one model of several files; select one, or name a file", t.path)
	}
	byFile := map[string][]int{}
	for i, n := range tensors {
		file, ok := t.document.File(n.Name)
		if !ok {
			return nil, fmt.Errorf("--output %s: tensor %q is not in %s; use a .safetensors file as output", t.path, n.Name, t.document.Index)
		}
		byFile[file] = append(byFile[file], i)
	}
	if missing := t.document.Missing(len(tensors)); missing > 0 {
		return nil, fmt.Errorf("--output %s: the selection lacks %d of the tensors of %s; select all of them, or use a .safetensors file as output", t.path, missing, t.document.Index)
	}
	writers := make([]*tensorWriter, len(tensors))
	for file, at := range byFile {
		out, err := newTarget(filepath.Join(t.temp, file), false, nil)
		if err != nil {
			return nil, err
		}
		t.files = append(t.files, out)
		out.path = filepath.Join(t.path, file)
		begun, err := out.begin(each(at, func(n int) tensorfile.Entry { return tensors[n] }), tensorfile.Document{Metadata: beside.Shards[file]})
		if err != nil {
			return nil, err
		}
		for i, n := range at {
			writers[n] = begun[i]
		}
	}
	return writers, nil
}

// commit completes the files and renames the folder.
func (t *folderTarget) commit() error {
	for _, out := range t.files {
		if err := out.commit(); err != nil {
			return err
		}
	}
	err := os.WriteFile(filepath.Join(t.temp, t.document.Index), []byte(t.document.Text), 0o666)
	if err == nil && filepath.Dir(t.temp) != t.path {
		return outputError(t.path, os.Rename(t.temp, t.path))
	}
	for _, out := range t.files {
		err = cmp.Or(err, os.Rename(out.real, out.path))
	}
	if err == nil { // the index comes last
		err = os.Rename(filepath.Join(t.temp, t.document.Index), filepath.Join(t.path, t.document.Index))
	}
	return outputError(t.path, err)
}

func (t *folderTarget) abandon() {
	for _, out := range t.files {
		out.abandon()
	}
	_ = os.RemoveAll(t.temp) // it is renamed when committed
}

type writtenJSON struct {
	Port string `json:"port,omitempty"` // of a model
	Name string `json:"name,omitempty"` // in a .safetensors file
	File string `json:"file"`
	descJSON
	Bytes int64 `json:"bytes"`
}

// written describes the only tensor of t, which must have been committed.
func (t *target) written(port string) writtenJSON {
	n := t.writers[0].Entry
	size, _ := n.Desc.Bytes() // begin has checked it
	j := writtenJSON{Port: port, File: t.path, descJSON: describe(n.Desc), Bytes: size}
	if strings.HasSuffix(t.path, tensorfile.FileSuffix) {
		j.Name = n.Name
	}
	return j
}
