package tensorfile

import (
	"archive/zip"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"slices"
	"strings"
)

// npySuffix ends the names of a .npz file's members.
const npySuffix = ".npy"

// zipHeader is the length of a local header without its texts.
const zipHeader = 30

// NPZ is an open .npz file: a zip archive of .npy files. Safe for concurrent use, except
// that Close comes last; each Reader of its arrays belongs to one goroutine.
type NPZ struct {
	names   []string
	members map[string]*zip.File
	close   func() error
}

// OpenNPZ opens a .npz file and checks its directory. Arrays are read, and decompressed,
// when they are asked for. The caller closes the result.
func OpenNPZ(path string) (*NPZ, error) {
	f, size, err := openFile(path)
	if err != nil {
		return nil, err
	}
	z, err := readNPZ(f, int64(size))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), f.Close())
	}
	z.close = f.Close
	return z, nil
}

func readNPZ(r io.ReaderAt, size int64) (*NPZ, error) {
	archive, err := zip.NewReader(r, size)
	if err != nil {
		return nil, zipError(early(err))
	}
	z := &NPZ{members: make(map[string]*zip.File, len(archive.File)), close: func() error { return nil }}
	for _, f := range archive.File {
		name, isNPY := strings.CutSuffix(f.Name, npySuffix)
		switch {
		case !isNPY:
			return nil, fmt.Errorf("%w: npz: the member %q is not a .npy file", ErrUnsupported, f.Name)
		case z.members[name] != nil:
			return nil, fmt.Errorf("%w: npz: two members are called %q", ErrFormat, f.Name)
		case f.Flags&1 != 0:
			return nil, fmt.Errorf("%w: npz: the member %q is encrypted", ErrUnsupported, f.Name)
		}
		z.names, z.members[name] = append(z.names, name), f
	}
	return z, apart(archive.File)
}

// apart checks that no two members share bytes: an archive could otherwise hold the same
// bytes under thousands of names.
func apart(members []*zip.File) error {
	type span struct {
		name       string
		begin, end int64 // with the part of its local header that every member has
	}
	spans := make([]span, len(members))
	for i, f := range members {
		data, err := f.DataOffset()
		if err != nil {
			return zipError(early(err))
		}
		size := int64(min(f.CompressedSize64, uint64(math.MaxInt64-data))) // too much is found when it is read
		spans[i] = span{f.Name, data - zipHeader, data + size}
	}
	slices.SortFunc(spans, func(a, b span) int { return cmp.Compare(a.begin, b.begin) })
	for i := 1; i < len(spans); i++ {
		if a, b := spans[i-1], spans[i]; b.begin < a.end {
			return fmt.Errorf("%w: npz: the members %q and %q overlap", ErrFormat, a.name, b.name)
		}
	}
	return nil
}

// Names returns the names of the arrays, in the order of the file.
func (z *NPZ) Names() []string { return append([]string(nil), z.names...) }

// Close closes the file: no array may be read any more.
func (z *NPZ) Close() error { return z.close() }

// Array returns an array, whose Reader decompresses it piece by piece, and gives the last
// byte only when the checksum of the archive is right. The header and the size that the
// archive has for the member are checked before.
func (z *NPZ) Array(name string) (Array, error) {
	f := z.members[name]
	if f == nil {
		return Array{}, fmt.Errorf("%w: %q", ErrNotFound, name)
	}
	a, err := member(f)
	if err != nil {
		return Array{}, fmt.Errorf("npz: %q: %w", name, err)
	}
	a.Name = name
	return a, nil
}

func member(f *zip.File) (a Array, err error) {
	m := &memberReader{file: f}
	defer m.close()
	if err := m.open(); err != nil {
		return a, err
	}
	if a.Desc, a.Layout, err = ReadNPYLayout(m); err != nil {
		return a, err
	}
	size, err := a.Bytes()
	if err != nil {
		return a, err
	}
	if header := m.read; f.UncompressedSize64 != uint64(header)+uint64(size) {
		return a, fmt.Errorf("%w: npz: %v has %d bytes, the archive has %d for it", ErrFormat, a.Desc, size, int64(f.UncompressedSize64)-header)
	}
	if size == 0 { // nobody reads it
		if _, err := io.ReadFull(m, make([]byte, 1)); err == nil {
			return a, zipError(zip.ErrFormat) // longer than its directory says
		} else if err != io.EOF {
			return a, err
		}
	}
	a.Reader, err = a.Layout.Stream(a.Desc, &memberReader{file: f, skip: m.read, size: size})
	return a, err
}

// memberReader reads a member of an archive, which it opens when it is first read and
// closes at its end. It skips a header that is known and gives the last byte of so many
// only once the checksum is right.
type memberReader struct {
	file       *zip.File
	skip, size int64 // size 0 is the whole member, as it is
	r          io.ReadCloser
	read       int64
	err        error
}

func (m *memberReader) open() (err error) {
	m.r, err = m.file.Open()
	if err == nil && m.skip > 0 {
		_, err = io.CopyN(io.Discard, m.r, m.skip)
	}
	return zipError(early(err))
}

func (m *memberReader) close() {
	if m.r != nil {
		_ = m.r.Close() // opened for reading
	}
}

func (m *memberReader) Read(p []byte) (int, error) {
	if m.err != nil || len(p) == 0 {
		return 0, m.err
	}
	if m.r == nil {
		if m.err = m.open(); m.err != nil {
			m.close()
			return 0, m.err
		}
	}
	if m.size > 0 {
		p = p[:min(int64(len(p)), m.size-m.read)]
	}
	n, err := m.r.Read(p)
	m.read += int64(n)
	if m.size > 0 && m.read == m.size {
		if err == nil {
			var more [1]byte
			_, err = io.ReadFull(m.r, more[:])
		}
		if err == io.EOF {
			m.err = io.EOF
			m.close()
			return n, nil
		}
		if err == nil {
			err = zip.ErrFormat // longer than its directory says
		}
	}
	if err == io.EOF && m.read < m.size {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		m.err = zipError(err)
		m.close()
		if m.size > 0 {
			n = 0
		}
	}
	return n, m.err
}

// early is the error of what may not end yet.
func early(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// zipError wraps what is wrong with an archive, or with reading it.
func zipError(err error) error {
	var path *fs.PathError
	switch {
	case err == nil, errors.Is(err, io.EOF):
		return err
	case errors.As(err, &path):
		return fmt.Errorf("tensorfile: read npz: %w", err)
	case errors.Is(err, zip.ErrAlgorithm):
		return fmt.Errorf("%w: npz: compressed by an unknown method; save it with numpy.savez", ErrUnsupported)
	case errors.Is(err, zip.ErrChecksum):
		return fmt.Errorf("%w: npz: the bytes are damaged: wrong checksum", ErrFormat)
	}
	return fmt.Errorf("%w: npz: the zip archive is damaged: %w", ErrFormat, err)
}
