package torchsave

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
	"sync"

	"github.com/tensorferry/tensorferry/tensorfile"
)

// File is an open file of torch.save: of one tensor, or of a dict of them. Safe for
// concurrent use, except that Close comes last; each Reader of its tensors belongs to one
// goroutine.
type File struct {
	// Bare says that the file holds one tensor without a name, and not a dict.
	Bare bool

	names   []string
	entries map[string]entry
	data    []byte // of the whole file
	close   io.Closer
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
	f := &File{Bare: r.bare, entries: make(map[string]entry, len(r.entries)), data: data}
	for _, e := range r.entries {
		f.names, f.entries[e.name] = append(f.names, e.name), e
	}
	for _, s := range r.m.stores {
		s.intact = sync.OnceValue(func() error {
			if s.crc != 0 && s.crc != crc32.ChecksumIEEE(data[s.data:s.data+s.size]) {
				return malformed("the storage %.80q is damaged: its checksum is wrong", s.key)
			}
			return nil
		})
	}
	return f, nil
}

// Names returns the names of the tensors, in the order of the dict. That of a bare one is empty.
func (f *File) Names() []string { return slices.Clone(f.names) }

// Close closes the file: no tensor may be read any more.
func (f *File) Close() error { return f.close.Close() }

// Array returns a tensor, whose Reader gathers it piece by piece. It reads the whole storage
// for the checksum before it gives the first byte.
func (f *File) Array(name string) (tensorfile.Array, error) {
	e, ok := f.entries[name]
	if !ok {
		return tensorfile.Array{}, fmt.Errorf("%w: %q", tensorfile.ErrNotFound, name)
	}
	size, err := e.Bytes()
	if err == nil && size == 0 { // nobody reads it
		err = e.intact()
	}
	begin := e.data + e.offset
	return tensorfile.Array{Name: name, Desc: e.Desc, Reader: e.Reader(f.data[begin:begin+e.Window], e.intact)}, err
}
