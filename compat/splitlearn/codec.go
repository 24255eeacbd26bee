package splitlearn

import (
	"bytes"
	"compress/zlib"
	"context"
	"errors"
	"io"
	"math"
	"slices"
	"sync"

	"github.com/tensorferry/tensorferry/internal/background"
	"github.com/tensorferry/tensorferry/internal/elements"
	"github.com/tensorferry/tensorferry/tensor"
)

// codec is how the elements of a float32 tensor lie in a message, which does not say it.
type codec uint8

const (
	float32s codec = iota
	float16s
	deflated // a zlib stream of float32
)

// maker makes elements for an RPC.
type maker struct {
	ctx  context.Context
	hold func(bytes int64) error // sets memory aside for what is about to be made
}

// convert writes the elements of src to dst, as elements.Convert does.
func (m maker) convert(dst []byte, to tensor.DataType, src []byte, from tensor.DataType) error {
	const unit = 4 // bytes that count for an element
	w, v := to.Bits()/8, from.Bits()/8
	return background.Pieces(m.ctx, len(src)/v*unit, func(a, b int) {
		elements.Convert(dst[a/unit*w:b/unit*w], to, src[a/unit*v:b/unit*v], from)
	})
}

// decode returns the float32 tensor that a message has, and how it has it. The length alone
// does not tell: of small tensors, one in a hundred compresses to the length of its float16. An
// axis of -1 is as long as float32 data says. It shares data, or makes other; errors begin with what.
func decode(what string, data []byte, dims []int32, m maker) (t tensor.Tensor, c codec, err error) {
	t.DType, t.Data = tensor.Float32, data
	free := -1
	for i, d := range dims[:min(len(dims), tensor.MaxRank+1)] {
		if d == -1 && free < 0 {
			free, d = i, 1
		}
		t.Shape = append(t.Shape, int64(d))
	}
	size, err := t.Bytes()
	length := int64(len(data))
	switch {
	case err != nil:
		return t, c, invalid("%s: %v", what, err)
	case free >= 0 && size > 0 && length%size == 0:
		t.Shape[free], size = length/size, length
	case free >= 0:
		return t, c, invalid("%s: %d bytes of float32 do not fit the shape %v", what, length, dims)
	}
	if size/inflateMost <= length {
		if made, err := inflate(data, size, m); made != nil || err != nil {
			t.Data = made
			return t, deflated, err
		}
	}
	switch length {
	case size:
		return t, float32s, nil
	case size / 2:
		if err := m.hold(size); err != nil {
			return t, c, err
		}
		t.Data = make([]byte, size)
		return t, float16s, m.convert(t.Data, tensor.Float32, data, tensor.Float16)
	}
	return t, c, invalid("%s: %d bytes do not match the shape %v: %d bytes as float32, %d as float16, or a zlib stream of float32", what, length, dims, size, size/2)
}

// inflate returns the size bytes that data is a zlib stream of, or nil if it is none.
func inflate(data []byte, size int64, m maker) ([]byte, error) {
	rest, n := bytes.NewReader(data), 0
	var probe [probeBytes]byte
	z, err := zlib.NewReader(rest)
	if err == nil {
		n, err = io.ReadFull(z, probe[:min(size, probeBytes)])
	}
	if err != nil {
		return nil, nil //nolint:nilerr // it is elements
	}
	if err := m.hold(size); err != nil {
		return nil, err
	}
	made := make([]byte, size)
	more := made[copy(made, probe[:n]):]
	late := background.Pieces(m.ctx, len(more), func(from, to int) {
		if err == nil {
			_, err = io.ReadFull(z, more[from:to])
		}
	})
	if late != nil {
		return nil, late
	}
	if err == nil {
		_, err = io.ReadFull(z, probe[:1]) // which checks the sum
	}
	if !errors.Is(err, io.EOF) || rest.Len() > 0 {
		return nil, nil
	}
	return made, nil
}

// encode returns the elements and dimensions of a result as a request had its own. The result is
// handed over.
func encode(t tensor.Tensor, c codec, m maker) (data []byte, dims []int32, err error) {
	from, to := t.DType, tensor.Float32
	if c == float16s {
		to = tensor.Float16
	}
	for _, d := range t.Shape {
		dims = append(dims, int32(min(d, math.MaxInt32)))
	}
	if from == tensor.Complex64 || from == tensor.Complex128 || slices.Contains(dims, math.MaxInt32) {
		return nil, nil, invalid("the result is %v, which has no form in a message", t.Desc)
	}
	if data = t.Data; from != to {
		n := len(data) * 8 / from.Bits() * to.Bits() / 8
		if n > len(data) {
			if err := m.hold(int64(n)); err != nil {
				return nil, nil, err
			}
			data = make([]byte, n)
		}
		if err := m.convert(data, to, t.Data, from); err != nil {
			return nil, nil, err
		}
		data = data[:n]
	}
	if c != deflated {
		return data, dims, nil
	}
	if err := m.hold(int64(len(data))); err != nil {
		return nil, nil, err
	}
	var b bytes.Buffer
	z := deflaters.Get().(*zlib.Writer) //nolint:forcetypeassert // as New
	defer deflaters.Put(z)
	z.Reset(&b)
	err = background.Pieces(m.ctx, len(data), func(from, to int) { _, _ = z.Write(data[from:to]) }) // a Buffer does not fail
	err = errors.Join(err, z.Close())
	z.Reset(io.Discard) // and is not kept
	return b.Bytes(), dims, err
}

// deflaters keeps what takes most of a megabyte to make. Its level spares the CPU, which all
// clients share.
var deflaters = sync.Pool{New: func() any {
	z, _ := zlib.NewWriterLevel(nil, zlib.BestSpeed) // a level that there is
	return z
}}
