package files

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

	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/torchsave"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// JSONOutput is what to say of a command that would print two things to stdout.
const JSONOutput = "--json prints to stdout; name a file with --output"

// Output is where a command writes tensors.
type Output interface {
	// Begin writes the headers of tensors, with what a model file has beside them, and
	// returns a writer for the bytes of each. It is called once.
	Begin(tensors []tensorfile.Entry, beside tensorfile.Document) ([]*TensorWriter, error)
	Commit() error
	Abandon()
}

// Target is an output: stdout, a device or pipe, or a file that is complete or absent. If
// its name ends in .safetensors, .pt or .pth, it has this format; otherwise it holds one
// tensor as .npy or raw bytes.
type Target struct {
	Path string // as typed
	raw  bool
	out  io.Writer

	Special bool     // path exists and is not a regular file: it is written in place
	Real    string   // path with symbolic links resolved
	temp    *os.File // renamed to real by commit; nil if there is none

	writers []*TensorWriter // nil until begin
	bare    bool            // a PyTorch file is of one tensor, and not of a dict
	parts   *torchsave.Parts
}

// NewTarget checks what path is and that it can be written, before a call begins. The
// caller commits or abandons the target.
func NewTarget(path string, raw bool, stdout io.Writer) (*Target, error) {
	t := &Target{Path: path, raw: raw, out: stdout, Real: "-"}
	switch {
	case path == "-":
		if IsTerminal(stdout) {
			return nil, fail.Usage("stdout is a terminal; name a file with --output or use a pipe")
		}
		return t, nil
	case path == "":
		return nil, fail.Usage("--output must not be empty")
	case strings.HasSuffix(path, arraysSuffix):
		return nil, fail.Usage("--output %s: .npz files are not supported; name a .safetensors file or, for one tensor, a .npy file", path)
	case strings.Contains(path, ".safetensors:"):
		return nil, fail.Usage("--output %s: an output is a whole file; omit the name after .safetensors", path)
	case raw && DescribesItself(path):
		return nil, fail.Usage("--output %s: --raw does not fit this extension; choose another", path)
	}
	if f := formatOf(path); f.name != "" {
		return nil, fail.Usage("--output %s: %s files are not supported; name a .npy, .safetensors or .pt file", path, f.name)
	}
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if _, err := os.Lstat(path); err == nil {
			return nil, fmt.Errorf("--output %s is a dangling symbolic link; remove it", path)
		}
		dir, err := filepath.EvalSymlinks(filepath.Dir(path))
		if err != nil {
			return nil, t.wrap(err)
		}
		t.Real = filepath.Join(dir, filepath.Base(path))
		return t, t.makeTemp(nil)
	case err != nil:
		return nil, t.wrap(err)
	case info.IsDir():
		return nil, fail.Usage("--output %s is a folder", path)
	case isFile(stdout, info): // such as /dev/stdout
		return t, nil
	case !info.Mode().IsRegular():
		t.Special, t.Real = true, ""
		return t, nil
	}
	if t.Real, err = filepath.EvalSymlinks(path); err != nil {
		return nil, t.wrap(err)
	}
	old, err := os.OpenFile(t.Real, os.O_WRONLY, 0) // checks the permission
	if err != nil {
		return nil, t.wrap(err)
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
func (t *Target) makeTemp(old fs.FileInfo) error {
	f, err := os.OpenFile(filepath.Join(filepath.Dir(t.Real), ".tensorferry-"+rand.Text()), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if old != nil && unwritable(err) { // the folder is, and the file is not
		f, err = os.CreateTemp("", ".tensorferry-")
	}
	if err != nil {
		return t.wrap(err)
	}
	t.temp, t.out = f, f
	if old != nil {
		if err := f.Chmod(old.Mode().Perm()); err != nil {
			t.Abandon()
			return t.wrap(err)
		}
	}
	return nil
}

// Begin implements output. The writers of a .safetensors or PyTorch file may be used in any
// order and concurrently; other outputs take one tensor. begin may block, because opening a
// pipe waits for its reader.
func (t *Target) Begin(tensors []tensorfile.Entry, beside tensorfile.Document) ([]*TensorWriter, error) {
	whole, torch := strings.HasSuffix(t.Path, tensorfile.FileSuffix), IsTorch(t.Path)
	if len(tensors) != 1 && (!whole && !torch || t.temp == nil) {
		return nil, fail.Usage("--output %s takes one tensor, not %d; use a .safetensors or .pt file for several", t.Path, len(tensors))
	}
	if t.Special {
		f, err := os.OpenFile(t.Path, os.O_WRONLY, 0)
		if err != nil {
			return nil, t.wrap(err)
		}
		t.out = f
	}
	writers := make([]*TensorWriter, len(tensors))
	for i, n := range tensors {
		size, err := n.Desc.Bytes()
		if err != nil {
			return nil, t.wrap(err)
		}
		writers[i] = &TensorWriter{Entry: n, target: t, left: size, to: t.out}
	}
	var err error
	switch {
	case whole:
		order := slices.SortedFunc(slices.Values(writers), func(a, b *TensorWriter) int { return tensorfile.Order(a.Entry, b.Entry) })
		var header []byte
		header, err = tensorfile.SafetensorsHeader(display.Each(order, func(w *TensorWriter) tensorfile.Entry { return w.Entry }), beside.Common())
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
			err = fail.Hinted(err, "or use --raw, which writes the bytes as they are")
		}
	}
	if err != nil {
		return nil, t.wrap(err)
	}
	t.writers = writers
	return writers, nil
}

// Changed is the error for a tensor that is not what the output has begun with.
const Changed = "tensor %q has changed since it was listed; try again"

// Open begins an output of one tensor, and shows its progress.
func (t *Target) Open(name string, d tensor.Desc, bars *ProgressBars) (io.Writer, error) {
	if len(t.writers) > 0 { // an attempt before this one has opened it
		if w := t.writers[0]; w.Name == name && w.Desc.Equal(d) {
			return w, nil
		}
		return nil, fmt.Errorf(Changed, name)
	}
	t.bare = true
	writers, err := t.Begin([]tensorfile.Entry{{Name: name, Desc: d}}, tensorfile.Document{})
	if err != nil {
		return nil, err
	}
	writers[0].Bar = bars.Tensor(name, d)
	return writers[0], nil
}

// TensorWriter takes the bytes of one tensor, in order. It belongs to one goroutine.
type TensorWriter struct {
	tensorfile.Entry
	target *Target
	left   int64 // bytes to come
	to     io.Writer
	crc    uint32 // of what was written of a PyTorch file
	Bar    *Bar
}

func (w *TensorWriter) Write(p []byte) (int, error) {
	if int64(len(p)) > w.left {
		return 0, fmt.Errorf("--output %s: too many bytes for tensor %q", w.target.Path, w.Name)
	}
	n, err := w.to.Write(p)
	w.left -= int64(n)
	if w.target.parts != nil {
		w.crc = crc32.Update(w.crc, crc32.IEEETable, p[:n])
	}
	_, _ = w.Bar.Write(p[:n]) // it never fails
	return n, w.target.wrap(err)
}

// Commit implements Output.
func (t *Target) Commit() error {
	if t.writers == nil {
		return fmt.Errorf("--output %s: nothing was written", t.Path)
	}
	for _, w := range t.writers {
		if w.left > 0 {
			return fmt.Errorf("--output %s: tensor %q is missing its last %d bytes", t.Path, w.Name, w.left)
		}
	}
	if err := t.fillGaps(); err != nil {
		return t.wrap(err)
	}
	if f, ok := t.out.(*os.File); ok && t.Special {
		return t.wrap(f.Close())
	}
	if t.temp == nil {
		return nil
	}
	err := t.temp.Close()
	if err == nil {
		err = t.replace()
	}
	return t.wrap(err)
}

// unwritable reports whether a folder does not let a file of it be replaced: one that may not be
// changed, or has the file mounted into it, as a container may.
func unwritable(err error) bool {
	return errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) || errors.Is(err, syscall.EBUSY) || errors.Is(err, syscall.EXDEV)
}

// replace puts the whole temporary file in the place of the old one.
func (t *Target) replace() error {
	why := os.Rename(t.temp.Name(), t.Real)
	if !unwritable(why) {
		return why
	}
	from, err := os.Open(t.temp.Name())
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.OpenFile(t.Real, os.O_WRONLY|os.O_TRUNC, 0)
	if err == nil {
		_, err = io.Copy(to, from)
		err = errors.Join(err, to.Close())
	}
	if kept := t.temp.Name(); err != nil {
		t.temp = nil
		return fmt.Errorf("%w; the whole result is in %s", err, kept)
	}
	fmt.Fprintf(os.Stderr, "tensorferry: --output %s was written in place: %v\n", t.Path, why.(*os.LinkError).Err) //nolint:errorlint // what Rename returns
	return os.Remove(t.temp.Name())
}

// fillGaps writes what a PyTorch file has between and behind its tensors: their checksums.
func (t *Target) fillGaps() (err error) {
	if t.parts == nil {
		return nil
	}
	crcs := display.Each(t.writers, func(w *TensorWriter) uint32 { return w.crc })
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

// Abandon removes what was not committed. A pipe that is being opened stays until the exit.
func (t *Target) Abandon() {
	if t.temp != nil {
		_ = t.temp.Close() // it may be closed already, and renamed
		_ = os.Remove(t.temp.Name())
	}
}

func (t *Target) wrap(err error) error { return outputError(t.Path, err) }

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

// FolderTarget is a folder for a model of several files. It is complete or absent.
type FolderTarget struct {
	path     string // as typed, cleaned
	temp     string // renamed to path by commit or, if path exists, what is in it is moved there
	document tensorfile.Document
	files    []*Target
}

// NewFolderTarget checks that the folder is new or empty and can be created, before
// anything is pulled. The caller commits or abandons the target.
func NewFolderTarget(path string) (*FolderTarget, error) {
	t := &FolderTarget{path: filepath.Clean(path)}
	entries, err := os.ReadDir(t.path)
	if len(entries) > 0 {
		return nil, fail.Usage("--output %s: the folder is not empty; use a new folder or a file", path)
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

// Begin begins each file of the model; it implements output.
func (t *FolderTarget) Begin(tensors []tensorfile.Entry, beside tensorfile.Document) ([]*TensorWriter, error) {
	t.document = beside
	if t.document.Index == "" {
		return nil, fail.Usage("--output %s is a folder, which is only for one model of several files; select one, or name a file", t.path)
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
	writers := make([]*TensorWriter, len(tensors))
	for file, at := range byFile {
		out, err := NewTarget(filepath.Join(t.temp, file), false, nil)
		if err != nil {
			return nil, err
		}
		t.files = append(t.files, out)
		out.Path = filepath.Join(t.path, file)
		begun, err := out.Begin(display.Each(at, func(n int) tensorfile.Entry { return tensors[n] }), tensorfile.Document{Metadata: beside.Shards[file]})
		if err != nil {
			return nil, err
		}
		for i, n := range at {
			writers[n] = begun[i]
		}
	}
	return writers, nil
}

// Commit completes the files and renames the folder.
func (t *FolderTarget) Commit() error {
	for _, out := range t.files {
		if err := out.Commit(); err != nil {
			return err
		}
	}
	err := os.WriteFile(filepath.Join(t.temp, t.document.Index), []byte(t.document.Text), 0o666)
	if err == nil && filepath.Dir(t.temp) != t.path {
		return outputError(t.path, os.Rename(t.temp, t.path))
	}
	for _, out := range t.files {
		err = cmp.Or(err, os.Rename(out.Real, out.Path))
	}
	if err == nil { // the index comes last
		err = os.Rename(filepath.Join(t.temp, t.document.Index), filepath.Join(t.path, t.document.Index))
	}
	return outputError(t.path, err)
}

// Abandon implements Output.
func (t *FolderTarget) Abandon() {
	for _, out := range t.files {
		out.Abandon()
	}
	_ = os.RemoveAll(t.temp) // it is renamed when committed
}

// WrittenJSON is a tensor that was written to a file.
type WrittenJSON struct {
	Port string `json:"port,omitempty"` // of a model
	Name string `json:"name,omitempty"` // in a .safetensors file
	File string `json:"file"`
	display.Desc
	Bytes int64 `json:"bytes"`
}

// Written describes the only tensor of t, which must have been committed.
func (t *Target) Written(port string) WrittenJSON {
	n := t.writers[0].Entry
	size, _ := n.Desc.Bytes() // begin has checked it
	j := WrittenJSON{Port: port, File: t.Path, Desc: display.Describe(n.Desc), Bytes: size}
	if strings.HasSuffix(t.Path, tensorfile.FileSuffix) {
		j.Name = n.Name
	}
	return j
}
