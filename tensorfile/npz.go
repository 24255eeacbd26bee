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

// NPZ is an open .npz file: a zip archive of .npy files. Safe for concurrent use; each Reader
// of its arrays belongs to one goroutine.
type NPZ struct {
	names   []string
	members map[string]*zip.File
}

// OpenNPZ opens a .npz file and checks its directory. Arrays are read, and decompressed,
// when they are asked for. The file is closed when nothing refers to the result any more.
func OpenNPZ(path string) (*NPZ, error) {
	f, size, err := openFile(path)
	if err != nil {
		return nil, err
	}
	z, err := readNPZ(f, int64(size))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), f.Close())
	}
	return z, nil
}

func readNPZ(r io.ReaderAt, size int64) (*NPZ, error) {
	archive, err := zip.NewReader(r, size)
	if err != nil {
		return nil, zipError(err)
	}
	z := &NPZ{members: make(map[string]*zip.File, len(archive.File))}
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
	return z, checkOverlap(archive.File)
}

// checkOverlap checks that no two members share bytes: an archive could otherwise hold the same
// bytes under thousands of names.
func checkOverlap(members []*zip.File) error {
	type span struct {
		name       string
		begin, end int64 // with the part of its local header that every member has
	}
	spans := make([]span, len(members))
	for i, f := range members {
		data, err := f.DataOffset()
		if err != nil {
			return zipError(err)
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
func (z *NPZ) Names() []string { return slices.Clone(z.names) }

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
	m, err := unzip(f)
	if err != nil {
		return a, err
	}
	defer m.Close()
	if a.Desc, a.Layout, err = ReadNPYLayout(m); err != nil {
		return a, err
	}
	size, err := a.Bytes()
	if err != nil {
		return a, err
	}
	header := m.read
	if f.UncompressedSize64 != uint64(header)+uint64(size) {
		return a, fmt.Errorf("%w: npz: %v has %d bytes, the archive has %d for it", ErrFormat, a.Desc, size, int64(f.UncompressedSize64)-header)
	}
	if size == 0 { // nobody reads it
		err = m.end()
	}
	if err == nil {
		a.Reader, err = a.Layout.Stream(a.Desc, &lazy{open: func() (io.Reader, error) {
			m, err := unzip(f)
			if err == nil {
				_, err = io.CopyN(io.Discard, m, header)
			}
			return HoldBack(m, size, m.end), zipError(err)
		}})
	}
	return a, err
}

// unzipped is an open member of an archive.
type unzipped struct {
	io.ReadCloser // closing it only lends its decompressor to another member
	read          int64
}

func unzip(f *zip.File) (*unzipped, error) {
	r, err := f.Open()
	return &unzipped{ReadCloser: r}, zipError(err)
}

func (u *unzipped) Read(p []byte) (int, error) {
	n, err := u.ReadCloser.Read(p)
	if u.read += int64(n); !errors.Is(err, io.EOF) {
		err = zipError(err)
	}
	return n, err
}

// end returns an error if bytes are left, or if the checksum is wrong.
func (u *unzipped) end() error {
	_, err := io.ReadFull(u, make([]byte, 1))
	switch err {
	case nil:
		return zipError(zip.ErrFormat) // longer than its directory says
	case io.EOF:
		return nil
	}
	return err
}

// zipError wraps what is wrong with an archive that may not end yet, or with reading it.
func zipError(err error) error {
	var path *fs.PathError
	switch {
	case err == nil, errors.Is(err, ErrFormat), errors.Is(err, ErrUnsupported):
		return err
	case errors.Is(err, io.EOF):
		err = io.ErrUnexpectedEOF
	case errors.As(err, &path):
		return fmt.Errorf("tensorfile: read npz: %w", err)
	case errors.Is(err, zip.ErrAlgorithm):
		return fmt.Errorf("%w: npz: compressed by an unknown method; save it with numpy.savez", ErrUnsupported)
	case errors.Is(err, zip.ErrChecksum):
		return fmt.Errorf("%w: npz: the bytes are damaged: wrong checksum", ErrFormat)
	}
	return fmt.Errorf("%w: npz: the zip archive is damaged: %w", ErrFormat, err)
}
