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
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/torchsave"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// readWait is how long an interrupted command waits for the read or write it is in.
const readWait = 100 * time.Millisecond

// npyLeast is fewer bytes than any .npy file has, so reading them does not block.
const npyLeast = 16

// rawInput has the flags that describe raw bytes.
type rawInput struct {
	dtype, shape string
	shaped       func() bool // --shape is given
}

func (r *rawInput) flags(c *cobra.Command) {
	dtypeFlag(c, &r.dtype, "", "data `type` of raw input, such as float32")
	c.Flags().StringVar(&r.shape, "shape", "", "`shape` of raw input, such as 1000,64; empty is a scalar")
	r.shaped = func() bool { return c.Flags().Changed("shape") }
}

func (r *rawInput) given() bool { return r.dtype != "" }

// check validates the flags. Call it before opening anything.
func (r *rawInput) check() error {
	switch {
	case r.given() && !r.shaped():
		return usage("--dtype needs --shape; --shape \"\" is a scalar")
	case r.shaped() && !r.given():
		return usage("--shape needs --dtype")
	}
	return nil
}

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

// source is a tensor to read, with its Name in a file of several. Files stay open until the
// process exits, because an interrupted call or push may still read them.
type source struct {
	client.Input
	title string // for messages: stdin, x.npy, or f.safetensors:name
}

// bytes returns a reader of the tensor's bytes. Call it once.
func (s *source) bytes() io.Reader {
	if s.Reader != nil {
		return s.Reader
	}
	return bytes.NewReader(s.Data)
}

// nameOf splits [NAME=]FILE, where FILE may also be a folder. If a file with the whole
// name exists, FILE is the whole text.
func nameOf(text string) (name, file string) {
	name, file, named := strings.Cut(text, "=")
	path, _ := memberOf(text)
	if _, err := os.Stat(path); !named || err == nil {
		return "", text
	}
	return name, file
}

// neither hints that the = of an argument may be part of the name of a missing file.
func neither(text, file string, err error) error {
	_, missing := os.Stat(file) // nil if something in it is missing
	if text == file || missing == nil || !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return hinted{err, fmt.Sprintf("neither %q nor %q exists", file, text)}
}

// several are the extensions of files that hold named tensors, or may do so.
var several = append([]string{tensorfile.FileSuffix, tensorfile.IndexSuffix, arraysSuffix}, torchSuffixes...)

func holdsSeveral(path string) bool {
	return hasSuffix(path, several) && (!isTorch(path) || isDict(path))
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// memberOf splits FILE:name, where FILE holds several tensors; otherwise there is no name.
func memberOf(file string) (path string, name []string) {
	for _, ending := range several {
		if path, name, member := strings.Cut(file, ending+":"); member {
			return path + ending, []string{name}
		}
	}
	if _, err := os.Stat(file); err == nil {
		return file, nil
	}
	for at, c := range file { // a folder's name may also have a colon
		if c == ':' && isDir(file[:at]) {
			return file[:at], []string{file[at+1:]}
		}
	}
	return file, nil
}

// isModel reports whether a path is a .safetensors file, the index of several, a folder, or a
// dict that torch.save wrote.
func isModel(path string) bool {
	return holdsSeveral(path) && !strings.HasSuffix(path, arraysSuffix) || isDir(path)
}

// describesItself reports whether a file of this name contains descs of its tensors.
func describesItself(file string) bool {
	path, _ := memberOf(file)
	return strings.HasSuffix(path, ".npy") || hasSuffix(path, several)
}

// opened holds the tensors that an argument of a command names.
type opened struct {
	tensors []*source
	path    string // of the file
	// Of a whole model file: its metadata and index, and the tensors that cannot be read.
	document tensorfile.Document
	unknown  []unknown
}

// unknown is a tensor of an unsupported data type.
type unknown struct {
	name string
	err  error
}

// errors joins the errors of the tensors that cannot be read.
func (o *opened) errors() error {
	return errors.Join(each(o.unknown, func(u unknown) error { return fmt.Errorf("%s: %w", o.path, u.err) })...)
}

var errStdinTwice = usage("stdin can be used only once")

// opener opens the inputs of a command.
type opener struct {
	raw   rawInput
	stdin io.Reader     // nil once it is used
	idle  time.Duration // how long a header may take; 0 is no limit
}

// open opens the file that an argument names, or stdin for "-". It waits for the header from
// a pipe until ctx ends.
func (i *opener) open(ctx context.Context, file string) (*opened, error) {
	title, stdin := file, io.Reader(nil)
	if file == "-" {
		title, stdin, i.stdin = "stdin", i.stdin, nil
		switch {
		case stdin == nil:
			return nil, errStdinTwice
		case isTerminal(stdin):
			fmt.Fprintln(os.Stderr, "reading from the terminal; Ctrl-D ends") // or the command seems to hang
		}
	}
	if i.idle > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, i.idle, fmt.Errorf("%w: nothing from or for %s in %v", client.ErrInputIdle, title, i.idle))
		defer cancel()
	}
	o, err := interruptible(ctx, func() (*opened, error) { return openFile(file, i.raw, stdin) })
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		err = fmt.Errorf("%s: %w", p.Path, p.Err) // without stat or open
	}
	return o, err
}

func openFile(file string, raw rawInput, stdin io.Reader) (*opened, error) {
	var s *source
	var err error
	switch path, name := memberOf(file); {
	case raw.given():
		s, err = openRaw(file, raw, stdin)
	case file == "-":
		s, err = openPipe("stdin", stdin, raw)
	case strings.HasSuffix(path, arraysSuffix), isTorch(path), isModel(path):
		return openSeveral(path, name)
	default:
		s, err = openNPY(file, raw)
	}
	if err != nil {
		return nil, err
	}
	return &opened{tensors: []*source{s}, path: file}, nil
}

// openSeveral opens all tensors of a model file, a .npz file or a PyTorch file, or only the one
// named.
func openSeveral(path string, only []string) (*opened, error) {
	var names []string
	var tensorOf func(name string) (tensorfile.Array, error)
	o := &opened{path: path}
	switch {
	case strings.HasSuffix(path, arraysSuffix):
		z, err := tensorfile.OpenNPZ(path)
		if err != nil {
			return nil, err
		}
		names, tensorOf = z.Names(), z.Array
	case isTorch(path):
		f, err := torchsave.Open(path)
		if err != nil {
			return nil, err
		}
		names, tensorOf = f.Names(), f.Array
	default:
		if isDir(path) {
			var err error
			if o.path, err = tensorfile.ModelIn(path); err != nil {
				return nil, err
			}
		}
		m, err := tensorfile.OpenModel(o.path)
		if err != nil {
			return nil, err
		}
		names = m.Names()
		tensorOf = func(name string) (tensorfile.Array, error) {
			t, err := m.Tensor(name)
			return tensorfile.Array{Name: name, Desc: t.Desc, Data: t.Data}, err
		}
		if only == nil {
			o.document = m.Document()
		}
	}
	if only != nil {
		names = only
	}
	for _, name := range names {
		a, err := tensorOf(name)
		switch {
		case errors.Is(err, tensorfile.ErrNotFound):
			err = hinted{fmt.Errorf("%s: %w: %q", o.path, tensorfile.ErrNotFound, name), "tensorferry show " + o.path + " lists its tensors"}
		case errors.Is(err, tensorfile.ErrUnsupported) && only == nil:
			o.unknown = append(o.unknown, unknown{name, err})
			continue
		case err != nil:
			err = fmt.Errorf("%s: %w", o.path, err)
		}
		if err != nil {
			return nil, err
		}
		title := o.path
		if name != "" { // that of the only tensor of a PyTorch file is empty
			title += ":" + name
		}
		o.tensors = append(o.tensors, arraySource(title, a))
	}
	return o, nil
}

func openNPY(path string, raw rawInput) (*source, error) {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() { // such as /dev/stdin, or a shell's <(command)
		r, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		return openPipe(path, r, raw)
	}
	a, _, err := tensorfile.OpenNPY(path)
	if err != nil {
		return nil, foreign(path, headOf(path), raw, err)
	}
	return arraySource(path, a), nil
}

func arraySource(title string, a tensorfile.Array) *source {
	return &source{client.Input{Name: a.Name, Desc: a.Desc, Data: a.Data, Reader: a.Reader}, title}
}

// openPipe opens a .npy file from stdin or another pipe.
func openPipe(title string, r io.Reader, raw rawInput) (*source, error) {
	in := bufio.NewReaderSize(r, 64<<10)
	peeked, _ := in.Peek(npyLeast) // fewer bytes at the end of the input
	head := bytes.Clone(peeked)
	d, layout, err := tensorfile.ReadNPYLayout(in)
	if err != nil {
		return nil, foreign(title, head, raw, err)
	}
	size, err := d.Bytes()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", title, err)
	}
	s, err := pipedSource(title, d, size, in)
	if err == nil {
		s.Reader, err = layout.Stream(d, s.Reader)
	}
	return s, err
}

// openRaw opens bytes that --dtype and --shape describe.
func openRaw(file string, raw rawInput, stdin io.Reader) (*source, error) {
	if describesItself(file) {
		return nil, usage("%s is not raw bytes; omit --dtype and --shape", file)
	}
	desc, size, err := parseDesc(raw.dtype, raw.shape)
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
	return &source{Input: client.FromReader("", desc, r), title: title}, nil
}

// readError is an error in the bytes of an input, shown without that of the call it fails.
type readError struct{ error }

// pipedSource returns a tensor that is read from r, whose last byte comes only after a check
// that no more follow: what is read to its end is never the beginning of a longer input.
func pipedSource(title string, d tensor.Desc, size int64, r io.Reader) (*source, error) {
	held := &heldBack{r, size, sync.OnceValue(func() error {
		if more(r) {
			return readError{fmt.Errorf("%s has more bytes than %v", title, d)}
		}
		return nil
	})}
	if size == 0 { // it is not read
		return &source{Input: client.FromReader("", d, r), title: title}, held.verdict()
	}
	return &source{Input: client.FromReader("", d, held), title: title}, nil
}

// heldBack reads the first bytes of r. It yields the last one, or EOF if there is none, only
// after a nil verdict, which is always the same.
type heldBack struct {
	r       io.Reader
	left    int64
	verdict func() error
}

func (h *heldBack) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if h.left > 1 {
		n, err := h.r.Read(p[:min(int64(len(p)), h.left-1)])
		h.left -= int64(n)
		return n, err
	}
	n, err := io.ReadFull(h.r, p[:h.left]) // one byte or none
	if err == nil {
		h.left = 0
		err = h.verdict()
	}
	if err == nil && n == 0 {
		err = io.EOF
	}
	if err != nil {
		n = 0
	}
	return n, err
}

// more reports whether r has another byte, without a long wait for a pipe that stays open.
func more(r io.Reader) bool {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	n, _ := interruptible(ctx, func() (int, error) { return io.ReadFull(r, make([]byte, 1)) }) // any error means no more bytes
	return n > 0
}

// interruptible waits for f, but not much longer than until ctx ends: f may block forever
// in a read or write, such as of stdin. Its goroutine then ends with the process.
func interruptible[T any](ctx context.Context, f func() (T, error)) (T, error) {
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
