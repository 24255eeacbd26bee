package torchsave

import (
	"bufio"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"sync"

	"github.com/tensorferry/tensorferry/tensorfile"
)

// File is an open file of torch.save: of one tensor, or of a dict of them. Safe for
// concurrent use, except that Close comes last; each Reader of its tensors belongs to one
// goroutine.
type File struct {
	// Bare says that the file holds one tensor without a name, and not a dict.
	Bare bool

	entries []entry
	index   map[string]int
	data    []byte // of the whole file
	close   io.Closer

	mu     sync.Mutex
	intact map[*storage]bool // its checksum is right
}

// Open opens a file, and reads and checks all of it but the bytes of its tensors. The
// caller closes the result. What tensorfile.OpenSafetensors says about shortening an open
// file and about writing to its bytes holds here too.
func Open(path string) (*File, error) {
	data, closer, err := tensorfile.Map(path)
	if err != nil {
		return nil, err
	}
	f, err := parse(data)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), closer.Close())
	}
	f.close = closer
	return f, nil
}

func parse(data []byte) (*File, error) {
	r := newReader(maxFilePickle, func(l Layout) error {
		if n, _ := l.Bytes(); n > max(l.Window, maxRepeated) {
			return limited("%v repeats its elements to %d bytes, the limit is %d", l.Desc, n, int64(maxRepeated))
		}
		return nil
	})
	r.many = true
	for rest := data; len(rest) > 0 && r.m.err == nil; {
		_, rest, _ = r.Next(rest)
		skip := min(r.pass, int64(len(rest)))
		rest, r.pass, r.pos = rest[skip:], r.pass-skip, r.pos+skip
	}
	if err := r.Close(); err != nil {
		return nil, err
	}
	f := &File{Bare: r.bare, entries: r.entries, index: make(map[string]int, len(r.entries)), data: data, intact: map[*storage]bool{}}
	for i, e := range f.entries {
		f.index[e.name] = i
	}
	return f, nil
}

// Names returns the names of the tensors, in the order of the dict. That of a bare one is empty.
func (f *File) Names() []string {
	names := make([]string, len(f.entries))
	for i, e := range f.entries {
		names[i] = e.name
	}
	return names
}

// Close closes the file: no tensor may be read any more.
func (f *File) Close() error { return f.close.Close() }

// Array returns a tensor, whose Reader gathers it piece by piece. It reads the whole storage
// for the checksum before it gives the first byte.
func (f *File) Array(name string) (tensorfile.Array, error) {
	i, ok := f.index[name]
	if !ok {
		return tensorfile.Array{}, fmt.Errorf("%w: %q", tensorfile.ErrNotFound, name)
	}
	t := f.entries[i].rebuilt
	size, err := t.Bytes()
	if err == nil && size == 0 { // nobody reads it
		err = f.check(t.storage)
	}
	return tensorfile.Array{Name: name, Desc: t.Desc, Reader: bufio.NewReaderSize(&gathering{f: f, t: t, left: size}, readAhead)}, err
}

// check returns an error if the bytes of a storage are damaged.
func (f *File) check(s *storage) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.intact[s] && s.crc != 0 && s.crc != crc32.ChecksumIEEE(f.data[s.data:s.data+s.size]) {
		return malformed("the storage %.*q is damaged: its checksum is wrong", quoted, s.key)
	}
	f.intact[s] = true
	return nil
}

// gathering reads a tensor of a file, row-major.
type gathering struct {
	f    *File
	t    *rebuilt
	from int64 // element
	left int64 // bytes
}

// Read implements io.Reader for a p of readAhead bytes or more.
func (g *gathering) Read(p []byte) (int, error) {
	if g.left == 0 {
		return 0, io.EOF
	}
	if g.from == 0 {
		if err := g.f.check(g.t.storage); err != nil {
			return 0, err
		}
	}
	w := width(g.t.Desc)
	n := min(int64(len(p))/w*w, g.left)
	begin := g.t.data + g.t.offset
	g.t.gather(p[:n], g.f.data[begin:begin+g.t.Window], g.from)
	g.from, g.left = g.from+n/w, g.left-n
	return int(n), nil
}
