// Package files reads and writes tensor files, pipes and raw bytes for commands, with a line of
// progress. An output file is complete or absent.
package files

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
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/torchsave"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// readWait is how long an interrupted command waits for the read or write it is in.
const readWait = 100 * time.Millisecond

// npyLeast is fewer bytes than any .npy file has, so reading them does not block.
const npyLeast = 16

// Streams are what a command reads and writes beside files.
type Streams struct {
	In       io.Reader
	Out, Err io.Writer
}

// RawInput has the flags that describe raw bytes.
type RawInput struct {
	DType, Shape string
	Shaped       func() bool // --shape is given
}

// Given reports whether the input is raw bytes.
func (r *RawInput) Given() bool { return r.DType != "" }

// Check validates the flags. Call it before opening anything.
func (r *RawInput) Check() error {
	switch {
	case r.Given() && !r.Shaped():
		return fail.Usage("--dtype needs --shape; --shape \"\" is a scalar")
	case r.Shaped() && !r.Given():
		return fail.Usage("--shape needs --dtype")
	}
	return nil
}

// ParseDesc parses a data type and a shape, and returns how many bytes they make.
func ParseDesc(dtype, shape string) (d tensor.Desc, size int64, err error) {
	if d.DType, err = tensor.ParseDataType(dtype); err == nil {
		d.Shape, err = tensor.ParseShape(shape)
	}
	if err == nil {
		size, err = d.Bytes()
	}
	if err != nil {
		return d, 0, fail.AsUsage(err)
	}
	return d, size, nil
}

// Source is a tensor to read, with its Name in a file of several. Files stay open until the
// process exits, because an interrupted call or push may still read them.
type Source struct {
	client.Input
	Title string // for messages: stdin, x.npy, or f.safetensors:name
}

// Open returns a reader of the tensor's bytes. Call it once.
func (s *Source) Open() io.Reader {
	if s.Reader != nil {
		return s.Reader
	}
	return bytes.NewReader(s.Data)
}

// NameOf splits [NAME=]FILE, where FILE may also be a folder. If a file with the whole
// name exists, FILE is the whole text.
func NameOf(text string) (name, file string) {
	name, file, named := strings.Cut(text, "=")
	path, _ := MemberOf(text)
	if _, err := os.Stat(path); !named || err == nil {
		return "", text
	}
	return name, file
}

// HintMissing hints that the = of an argument may be part of the name of a missing file.
func HintMissing(text, file string, err error) error {
	_, missing := os.Stat(file) // nil if something in it is missing
	if text == file || missing == nil || !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return fail.Hinted(err, fmt.Sprintf("neither %q nor %q exists", file, text))
}

// several are the extensions of files that hold named tensors, or may do so.
var several = append([]string{tensorfile.FileSuffix, tensorfile.IndexSuffix, arraysSuffix}, torchSuffixes...)

// IsDir reports whether a path is a folder.
func IsDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// MemberOf splits FILE:name, where FILE holds several tensors; otherwise there is no name.
func MemberOf(file string) (path string, name []string) {
	for _, ending := range several {
		if path, name, member := strings.Cut(file, ending+":"); member {
			return path + ending, []string{name}
		}
	}
	if _, err := os.Stat(file); err == nil {
		return file, nil
	}
	for at, c := range file { // a folder's name may also have a colon
		if c == ':' && IsDir(file[:at]) {
			return file[:at], []string{file[at+1:]}
		}
	}
	return file, nil
}

// DescribesItself reports whether a file of this name contains descs of its tensors.
func DescribesItself(file string) bool {
	path, _ := MemberOf(file)
	return strings.HasSuffix(path, ".npy") || hasSuffix(path, several)
}

// Opened holds the tensors that an argument of a command names.
type Opened struct {
	Tensors []*Source
	Path    string // of the file
	// Named says that the file holds named tensors, Whole that all of them are meant, and
	// Model that it is a model file.
	Named, Whole, Model bool
	// Of a whole model file: its metadata and index, and the tensors that cannot be read.
	Document tensorfile.Document
	Unknown  []unknown
}

// unknown is a tensor of an unsupported data type.
type unknown struct {
	Name string
	Err  error
}

// Errors joins the errors of the tensors that cannot be read.
func (o *Opened) Errors() error {
	return errors.Join(display.Each(o.Unknown, func(u unknown) error { return fail.In(o.Path, u.Err) })...)
}

// StdinTwice is what to say of stdin where it is named twice.
const StdinTwice = "stdin can be used only once"

// Opener opens the inputs of a command.
type Opener struct {
	Raw   RawInput
	Stdin io.Reader     // nil once it is used
	Idle  time.Duration // how long a header may take; 0 is no limit
}

// Open opens the file that an argument names, or stdin for "-". It waits for the header from
// a pipe until ctx ends.
func (i *Opener) Open(ctx context.Context, file string) (*Opened, error) {
	title, stdin := file, io.Reader(nil)
	if file == "-" {
		title, stdin, i.Stdin = "stdin", i.Stdin, nil
		switch {
		case stdin == nil:
			return nil, fail.Usage(StdinTwice)
		case IsTerminal(stdin):
			fmt.Fprintln(os.Stderr, "reading from the terminal; Ctrl-D ends") // or the command seems to hang
		}
	}
	if i.Idle > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, i.Idle, fmt.Errorf("%w: nothing from or for %s in %v", client.ErrInputIdle, title, i.Idle))
		defer cancel()
	}
	o, err := Interruptible(ctx, func() (*Opened, error) { return openFile(file, i.Raw, stdin) })
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		err = fail.In(p.Path, p.Err) // without stat or open
	}
	return o, err
}

func openFile(file string, raw RawInput, stdin io.Reader) (*Opened, error) {
	var s *Source
	var err error
	switch path, name := MemberOf(file); {
	case raw.Given():
		s, err = openRaw(file, raw, stdin)
	case file == "-":
		s, err = openPipe("stdin", stdin, raw)
	case hasSuffix(path, several), IsDir(path):
		return openSeveral(path, name)
	default:
		s, err = openNPY(file, raw)
	}
	if err != nil {
		return nil, err
	}
	return &Opened{Tensors: []*Source{s}, Path: file}, nil
}

// openSeveral opens all tensors of a model file, a .npz file or a PyTorch file, or only the one
// named.
func openSeveral(path string, only []string) (_ *Opened, err error) {
	o := &Opened{Path: path, Named: true, Whole: only == nil, Model: true}
	var in interface {
		Names() []string
		Array(name string) (tensorfile.Array, error)
	}
	switch {
	case strings.HasSuffix(path, arraysSuffix):
		in, err = tensorfile.OpenNPZ(path)
		o.Model = false
	case IsTorch(path):
		var f *torchsave.File
		if f, err = torchsave.Open(path); err == nil && f.Bare {
			o.Named, o.Model = false, false
		}
		in = f
	default:
		if IsDir(path) {
			o.Path, err = tensorfile.ModelIn(path)
		}
		var m *tensorfile.Safetensors
		if err == nil {
			m, err = tensorfile.OpenModel(o.Path)
		}
		if err == nil && o.Whole {
			o.Document = m.Document()
		}
		in = m
	}
	if err != nil {
		return nil, err
	}
	names := only
	if o.Whole {
		names = in.Names()
	}
	for _, name := range names {
		a, err := in.Array(name)
		switch {
		case errors.Is(err, tensorfile.ErrNotFound):
			err = fail.Hinted(fail.In(o.Path, fmt.Errorf("%w: %q", tensorfile.ErrNotFound, name)), "tensorferry show "+o.Path+" lists its tensors")
		case errors.Is(err, tensorfile.ErrUnsupported) && o.Whole:
			o.Unknown = append(o.Unknown, unknown{name, err})
			continue
		case err != nil:
			err = fail.In(o.Path, err)
		}
		if err != nil {
			return nil, err
		}
		title := o.Path
		if name != "" { // that of the only tensor of a PyTorch file is empty
			title += ":" + name
		}
		o.Tensors = append(o.Tensors, ArraySource(title, a))
	}
	return o, nil
}

func openNPY(path string, raw RawInput) (*Source, error) {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() { // such as /dev/stdin, or a shell's <(command)
		r, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		return openPipe(path, r, raw)
	}
	a, _, err := tensorfile.OpenNPY(path)
	if err != nil {
		return nil, formatError(path, headOf(path), raw, err)
	}
	return ArraySource(path, a), nil
}

// ArraySource returns an array of a file as a source.
func ArraySource(title string, a tensorfile.Array) *Source {
	return &Source{client.Input{Name: a.Name, Desc: a.Desc, Data: a.Data, Reader: a.Reader}, title}
}

// openPipe opens a .npy file from stdin or another pipe.
func openPipe(title string, r io.Reader, raw RawInput) (*Source, error) {
	in := bufio.NewReaderSize(r, 64<<10)
	peeked, _ := in.Peek(npyLeast) // fewer bytes at the end of the input
	head := bytes.Clone(peeked)
	d, layout, err := tensorfile.ReadNPYLayout(in)
	if err != nil {
		return nil, formatError(title, head, raw, err)
	}
	size, err := d.Bytes()
	if err != nil {
		return nil, fail.In(title, err)
	}
	s, err := pipedSource(title, d, size, in)
	if err == nil {
		s.Reader, err = layout.Stream(d, s.Reader)
	}
	return s, err
}

// openRaw opens bytes that --dtype and --shape describe.
func openRaw(file string, raw RawInput, stdin io.Reader) (*Source, error) {
	if DescribesItself(file) {
		return nil, fail.Usage("%s is not raw bytes; omit --dtype and --shape", file)
	}
	desc, size, err := ParseDesc(raw.DType, raw.Shape)
	if err != nil {
		return nil, err
	}
	title, r := "stdin", stdin
	if file != "-" {
		title = file
		if r, err = os.Open(file); err != nil {
			return nil, err
		}
	}
	f, _ := r.(*os.File)
	switch info, err := f.Stat(); { // fails for what is not a file
	case err == nil && info.IsDir():
		return nil, fmt.Errorf("%s is a directory", title)
	case err == nil && info.Mode().IsRegular(): // it ends where it is to
		at, err := f.Seek(0, io.SeekCurrent)
		if left := info.Size() - at; err == nil && left > size { // a shorter one may still grow
			err = fmt.Errorf("%s has %d bytes, but %v has %d", title, left, desc, size)
		}
		if err != nil {
			return nil, err
		}
	case err != nil || info.Mode()&os.ModeCharDevice == 0: // a device has no end
		return pipedSource(title, desc, size, r)
	}
	return &Source{Input: client.FromReader("", desc, r), Title: title}, nil
}

// pipedSource returns a tensor that is read from r, whose last byte comes only after a check
// that no more follow: what is read to its end is never the beginning of a longer input.
func pipedSource(title string, d tensor.Desc, size int64, r io.Reader) (*Source, error) {
	whole := sync.OnceValue(func() error {
		if hasMore(r) {
			return fail.OfInput(fmt.Errorf("%s has more bytes than %v", title, d))
		}
		return nil
	})
	s := &Source{Input: client.FromReader("", d, tensorfile.HoldBack(r, size, whole)), Title: title}
	if size == 0 { // it is not read
		return s, whole()
	}
	return s, nil
}

// hasMore reports whether r has another byte, without a long wait for a pipe that stays open.
func hasMore(r io.Reader) bool {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	n, _ := Interruptible(ctx, func() (int, error) { return io.ReadFull(r, make([]byte, 1)) }) // any error means no more bytes
	return n > 0
}

// Interruptible waits for f, but not much longer than until ctx ends: f may block forever
// in a read or write, such as of stdin. Its goroutine then ends with the process.
func Interruptible[T any](ctx context.Context, f func() (T, error)) (T, error) {
	var value T
	var err error
	ended := make(chan struct{})
	go func() {
		value, err = f()
		close(ended)
	}()
	late := make(chan struct{})
	defer context.AfterFunc(ctx, func() { time.AfterFunc(readWait, func() { close(late) }) })()
	select {
	case <-ended:
		return value, err
	case <-late:
		var none T
		return none, context.Cause(ctx)
	}
}
