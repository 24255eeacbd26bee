package tensorfile

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/tensorferry/tensorferry/tensor"
)

// Layout says where the elements of a .npy file lie otherwise than a tensor's: with the
// most significant byte first, or with the first axis as the one that runs fastest.
type Layout struct{ BigEndian, Fortran bool }

// Array is an array of a .npy or .npz file. Its bytes as a tensor has them are in Data,
// read-only, which is lent until the file is closed, or else come from Reader, once.
type Array struct {
	Name string // in a .npz file
	tensor.Desc
	// Layout is how the file holds the bytes; Reader converts them.
	Layout Layout
	Data   []byte
	Reader io.Reader
}

// OpenNPY maps a .npy file of exactly one array, of any layout. The array is lent until
// the closer is closed, which the caller does once. What OpenSafetensors says about
// shortening an open file and about writing to its bytes holds here too.
func OpenNPY(path string) (Array, io.Closer, error) {
	var a Array
	data, closeMap, err := mapAfter(path, func(r io.Reader, _ int64) (err error) {
		a.Desc, a.Layout, err = ReadNPYLayout(r)
		return err
	})
	if err != nil {
		return Array{}, nil, err
	}
	t, err := tensor.New(a.Desc, data)
	if err != nil {
		return Array{}, nil, errors.Join(fmt.Errorf("%s: %w: npy: %w", path, ErrFormat, err), closeMap())
	}
	a.Data = t.Data
	if a.Layout != (Layout{}) {
		a.Reader, a.Data = a.Layout.reader(a.Desc, a.Data), nil
	}
	return a, closer(closeMap), nil
}

// ReadNPYLayout reads a .npy header, versions 1.0 to 3.0, and leaves r at the first byte of
// the data, of which the desc tells the size. It reads no byte more. The error of a stream
// that ends within the header wraps io.ErrUnexpectedEOF. A layout that makes no difference,
// as Fortran order of a vector, is not reported.
func ReadNPYLayout(r io.Reader) (tensor.Desc, Layout, error) {
	d, l, err := readNPYHeader(r)
	if err != nil {
		return tensor.Desc{}, Layout{}, err
	}
	long, empty := 0, false
	for _, dim := range d.Shape {
		empty = empty || dim == 0
		if dim > 1 {
			long++
		}
	}
	l.Fortran = l.Fortran && long > 1 && !empty
	l.BigEndian = l.BigEndian && swapped(d.DType) > 1 && !empty
	return d, l, nil
}

// swapped is how many bytes are swapped together: those of a part of a complex number.
func swapped(d tensor.DataType) int {
	if d == tensor.Complex64 || d == tensor.Complex128 {
		return d.Bits() / 16
	}
	return d.Bits() / 8
}

// Stream returns the bytes of a tensor, which r yields in this layout. Those of an array
// in Fortran order are held in memory until the reader ends: up to MaxFortranStream, more
// is refused. r is borrowed.
func (l Layout) Stream(d tensor.Desc, r io.Reader) (io.Reader, error) {
	if !l.Fortran {
		return l.inOrder(d, r), nil
	}
	size, err := d.Bytes()
	if err == nil && size > MaxFortranStream {
		err = fmt.Errorf("%w: npy: %d bytes in Fortran order, the limit outside of a .npy file is %d; save it with numpy.ascontiguousarray(array)",
			ErrUnsupported, size, MaxFortranStream)
	}
	if err != nil {
		return nil, err
	}
	return &lazy{open: func() (io.Reader, error) {
		all := make([]byte, size) // once, up to MaxFortranStream: growing would take twice as much
		_, err := io.ReadFull(r, all)
		return l.reader(d, all), err
	}}, nil
}

// inOrder returns the bytes of an array that r yields row by row, with the least significant
// byte first.
func (l Layout) inOrder(d tensor.Desc, r io.Reader) io.Reader {
	if !l.BigEndian {
		return r
	}
	return bufio.NewReaderSize(&swapping{r, swapped(d.DType)}, readAhead)
}

// reader returns the bytes of an array that data, which is borrowed, holds.
func (l Layout) reader(d tensor.Desc, data []byte) io.Reader {
	if !l.Fortran {
		return l.inOrder(d, bytes.NewReader(data))
	}
	columns, step := Strided{d, make([]int64, len(d.Shape))}, int64(1)
	for i, dim := range d.Shape {
		columns.Strides[i] = step
		step *= dim
	}
	return l.inOrder(d, columns.Reader(data, nil))
}

// swapping swaps the bytes of each unit that it reads, for a p of readAhead bytes.
type swapping struct {
	r    io.Reader
	unit int
}

func (s *swapping) Read(p []byte) (int, error) {
	n, err := io.ReadAtLeast(s.r, p[:readAhead], s.unit)
	if part := n % s.unit; part > 0 && err == nil { // of the last unit, whose rest is still to come
		if _, err = io.ReadFull(s.r, p[n:n+s.unit-part]); errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		n += s.unit - part
	}
	if err != nil {
		return 0, err
	}
	swap(p[:n], s.unit)
	return n, nil
}

// swap reverses each unit of 2, 4 or 8 bytes.
func swap(b []byte, unit int) {
	for ; len(b) >= unit; b = b[unit:] {
		switch unit {
		case 2:
			binary.LittleEndian.PutUint16(b, binary.BigEndian.Uint16(b))
		case 4:
			binary.LittleEndian.PutUint32(b, binary.BigEndian.Uint32(b))
		case 8:
			binary.LittleEndian.PutUint64(b, binary.BigEndian.Uint64(b))
		}
	}
}
