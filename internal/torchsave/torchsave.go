// Package torchsave reads and writes what torch.save makes of a tensor, and reads and
// writes files of a flat dict of them.
//
// It is closed: a fixed list of opcodes, globals and records, and everything else is
// refused by name. Nothing is ever executed, and nothing is allocated before what asks for
// it is bounded. Anyone inside of the module may call it. A Reader borrows the bytes that
// it is fed; the tensors of an open file are lent until it is closed.
//
// Every error about a file's content wraps tensorfile.ErrFormat or
// tensorfile.ErrUnsupported; beside it tensor.ErrTooLarge where a limit is the cause.
package torchsave

import (
	"github.com/tensorferry/tensorferry/tensor"
)

// Layout is how a tensor lies in the storage of a file.
type Layout struct {
	tensor.Desc
	// Strides are the distances of neighbours along each axis in elements, 0 or more.
	Strides []int64
	// Window is how many bytes there are from the tensor's first element to its last one,
	// both included: what a Reader hands out. It is 0 if there are no elements.
	Window int64
}

// Dense reports whether the window is the tensor: row-major without gaps.
func (l Layout) Dense() bool { return false }

// Gather copies the elements from a window into dst, row-major. dst has as many bytes as
// Desc says, window as many as Window does.
func (l Layout) Gather(dst, window []byte) {}

// Head hands over what a file of one tensor has before the tensor's bytes, which are
// row-major and little-endian. The error wraps tensorfile.ErrUnsupported when torch has no
// such type.
func Head(d tensor.Desc) ([]byte, error) { return nil, nil }

// Tail hands over what a file of one tensor has behind its bytes, of which crc is the
// CRC-32 (IEEE). Head must have returned no error.
func Tail(d tensor.Desc, crc uint32) []byte { return nil }

// Size returns the bytes of a file of one tensor: of Head, the tensor and Tail.
func Size(d tensor.Desc) (int64, error) { return 0, nil }

// Reader reads a file of torch.save of one tensor that comes in pieces, in order. It holds
// a few KiB and starts nothing. It belongs to one goroutine.
type Reader struct{}

// NewReader returns a Reader of a file whose tensor, and the window in which its elements
// lie, have up to maxBytes bytes each. A larger one is refused as soon as the layout is
// known; the error wraps tensor.ErrTooLarge.
func NewReader(maxBytes int64) *Reader { return &Reader{} }

// Next consumes p until it has bytes of the tensor's window or p ends. data and rest are
// parts of p, which is borrowed: call Next again with rest until it is empty, then with
// what comes next. All data together is the window; bytes of the storage outside of it,
// other records and the directory are checked and not returned. After an error the
// Reader returns it again.
func (r *Reader) Next(p []byte) (data, rest []byte, err error) { return nil, nil, nil }

// Layout returns the tensor's layout once it is known: within the first few hundred bytes
// of a file, and before Next returns data.
func (r *Reader) Layout() (l Layout, known bool) { return l, false }

// Close returns nil if the file was whole, up to and including its end record. The data is
// only then known to be what the file's checksums say.
func (r *Reader) Close() error { return nil }
