// Package tensor names a tensor: its data type, its shape, its identity, and
// how many bytes that makes, computed without overflow.
//
// It refuses to hold strides or byte orders: a tensor here is dense, row-major
// and little-endian, as on the wire. Everyone may import it; it starts nothing
// and never allocates from a number it has not checked.
// A Tensor borrows its bytes: whoever built it owns them.
package tensor

import (
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/google/uuid"
)

// Errors that callers decide on. Every error of this package wraps one of them.
var (
	// ErrDataType is wrapped when a data type is unknown or not the one wanted.
	ErrDataType = errors.New("tensor: bad data type")
	// ErrShape is wrapped when a shape is malformed or does not fit its bytes.
	ErrShape = errors.New("tensor: bad shape")
	// ErrTooLarge is wrapped when a size passes what 64 bits or a limit allow.
	ErrTooLarge = errors.New("tensor: the tensor is too large")
)

// ID names one tensor or one call: 16 bytes, a UUIDv7 when made by this module.
// The zero ID names nothing.
type ID [16]byte

// NewID returns a UUIDv7: unique, and sorted by time in logs and stores. Alone in this
// package it reads the clock and randomness: whatever is to be repeatable is given its IDs.
// Safe for concurrent use.
func NewID() ID { return ID(uuid.Must(uuid.NewV7())) }

// IsZero reports whether id names nothing.
func (id ID) IsZero() bool { return id == ID{} }

// String returns id as 32 lower-case hexadecimal digits.
func (id ID) String() string { return hex.EncodeToString(id[:]) }

// ParseID copies an ID out of its 16 wire bytes.
func ParseID(b []byte) (id ID, ok bool) {
	if len(b) == len(id) {
		id = ID(b)
	}
	return id, !id.IsZero()
}

// Shape is the number of elements along each axis, outermost first. A nil or
// empty shape is a scalar: rank 0, one element.
type Shape []int64

// Validate reports whether every dimension and the rank are within the limits
// of this package, naming the offending axis.
func (s Shape) Validate() error {
	if len(s) > MaxRank {
		return fmt.Errorf("%w: rank %d is over the limit of %d", ErrShape, len(s), MaxRank)
	}
	for i, d := range s {
		if d < 0 {
			return fmt.Errorf("%w: dimension %d is %d; a dimension is 0 or more", ErrShape, i, d)
		}
		if d > MaxDim {
			return fmt.Errorf("%w: dimension %d is %d, over the limit of %d", ErrShape, i, d, int64(MaxDim))
		}
	}
	return nil
}

// Elements returns the product of the dimensions: 1 for a scalar. A dimension of 0 does
// not excuse the others, whose product must not overflow: NumPy and PyTorch can make no
// such array, and some of the axes alone would still count too many rows.
func (s Shape) Elements() (int64, error) {
	n, err := s.others()
	if err == nil && slices.Contains(s, 0) {
		n = 0
	}
	return n, err
}

// others returns the product of the dimensions that are not 0.
func (s Shape) others() (int64, error) {
	if err := s.Validate(); err != nil {
		return 0, err
	}
	n := int64(1)
	for _, d := range s {
		if d > 0 && n > math.MaxInt64/d {
			return 0, fmt.Errorf("%w: shape %v has more than 2^63 elements", ErrTooLarge, s)
		}
		n *= max(d, 1)
	}
	return n, nil
}

// Equal reports whether both shapes have the same rank and dimensions.
func (s Shape) Equal(o Shape) bool { return slices.Equal(s, o) }

// Clone copies the shape.
func (s Shape) Clone() Shape { return append(Shape(nil), s...) }

// String returns the shape as [2 3 4].
func (s Shape) String() string { return fmt.Sprint([]int64(s)) }

// ParseShape reads "2,3,4"; the empty text is a scalar.
func ParseShape(text string) (Shape, error) {
	text = strings.TrimSpace(text)
	if text == "" {
		return Shape{}, nil
	}
	var s Shape
	for part := range strings.SplitSeq(text, ",") {
		d, err := strconv.ParseInt(strings.TrimSpace(part), 10, 64)
		if err != nil {
			return nil, fmt.Errorf("%w: %.64q is not a dimension; write a shape as 2,3,4", ErrShape, part)
		}
		s = append(s, d)
		if len(s) > MaxRank {
			break // Validate names the limit
		}
	}
	return s, s.Validate()
}

// Desc describes a tensor's content: what its elements are and how many.
type Desc struct {
	DType DataType
	Shape Shape
}

// Bytes returns the size of the dense tensor in bytes.
func (d Desc) Bytes() (int64, error) {
	if !d.DType.Valid() {
		return 0, fmt.Errorf("%w: %v", ErrDataType, d.DType)
	}
	n, err := d.Shape.others()
	if err != nil {
		return 0, err
	}
	width := int64(d.DType.Bits() / 8) // every data type of today fills whole bytes
	if n > math.MaxInt64/width {
		return 0, fmt.Errorf("%w: %v of shape %v passes 2^63 bytes", ErrTooLarge, d.DType, d.Shape)
	}
	if slices.Contains(d.Shape, 0) {
		return 0, nil
	}
	return n * width, nil
}

// Equal reports whether both describe the same content.
func (d Desc) Equal(o Desc) bool { return d.DType == o.DType && d.Shape.Equal(o.Shape) }

// Clone copies the desc, its shape included.
func (d Desc) Clone() Desc { return Desc{d.DType, d.Shape.Clone()} }

// String returns the desc as float32[2 3].
func (d Desc) String() string { return d.DType.String() + d.Shape.String() }

// Rows splits the tensor's axes: as many leading ones as axes says
// count as rows, the others make one row of rowBytes bytes. axes must be within
// the rank.
func (d Desc) Rows(axes int) (rows, rowBytes int64, err error) {
	if axes < 0 || axes > len(d.Shape) {
		return 0, 0, fmt.Errorf("%w: %d leading axes of a tensor of rank %d", ErrShape, axes, len(d.Shape))
	}
	if _, err := d.Bytes(); err != nil {
		return 0, 0, err
	}
	if rows, err = d.Shape[:axes].Elements(); err != nil {
		return 0, 0, err
	}
	rowBytes, err = Desc{d.DType, d.Shape[axes:]}.Bytes()
	return rows, rowBytes, err
}

// Tensor is a desc and its bytes: dense, row-major, little-endian. It borrows
// Data: whoever made the Tensor says how long the bytes stay valid.
type Tensor struct {
	Desc
	Data []byte
}

// New checks that data has exactly the size that desc asks for. The tensor
// shares data with the caller.
func New(desc Desc, data []byte) (Tensor, error) {
	n, err := desc.Bytes()
	if err != nil {
		return Tensor{}, err
	}
	if int64(len(data)) != n {
		return Tensor{}, fmt.Errorf("%w: %v needs %d bytes, got %d", ErrShape, desc, n, len(data))
	}
	return Tensor{desc, data}, nil
}
