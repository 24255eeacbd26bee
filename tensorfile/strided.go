package tensorfile

import (
	"bufio"
	"io"
	"math"
	"slices"

	"github.com/tensorferry/tensorferry/tensor"
)

// Strided is how the elements of a tensor lie in memory: neighbors along an axis are as many
// elements apart as its stride says, 0 or more.
type Strided struct {
	tensor.Desc
	Strides []int64
}

// Dense reports whether the elements lie row by row without gaps.
func (s Strided) Dense() bool {
	if slices.Contains(s.Shape, 0) {
		return true
	}
	shape, strides := s.axes()
	return len(shape) == 1 && strides[0] == 1
}

// axes returns the axes of a tensor with elements, as few as there can be, but one at least: none of one element, and none
// that goes on where the next one ends.
func (s Strided) axes() (shape, strides []int64) {
	shape, strides = []int64{1}, []int64{1}
	for i, dim := range s.Shape {
		switch last := len(shape) - 1; {
		case dim == 1:
		case shape[last] == 1:
			shape[last], strides[last] = dim, s.Strides[i]
		case s.Strides[i] <= math.MaxInt64/dim && strides[last] == dim*s.Strides[i]:
			shape[last], strides[last] = shape[last]*dim, s.Strides[i]
		default:
			shape, strides = append(shape, dim), append(strides, s.Strides[i])
		}
	}
	return shape, strides
}

// Gather copies elements from a window, which begins with the first one, to dst, row by row:
// as many as it has room for, beginning with element from. It borrows both; dst has room for
// whole elements.
func (s Strided) Gather(dst, window []byte, from int64) {
	if len(dst) == 0 { // there may be no element
		return
	}
	shape, strides := s.axes()
	w, inner := int64(s.DType.Bits()/8), len(shape)-1
	at, off := make([]int64, len(shape)), int64(0)
	for i := inner; i >= 0; i-- {
		at[i], from = from%shape[i], from/shape[i]
		off += at[i] * strides[i]
	}
	for len(dst) > 0 {
		n := min(shape[inner]-at[inner], int64(len(dst))/w)
		run, src, step := dst[:n*w], window[off*w:], int(strides[inner]*w)
		switch {
		case strides[inner] == 1:
			copy(run, src)
		case w == 4: // a copy of constant length is one instruction
			for i, j := 0, 0; i < len(run); i, j = i+4, j+step {
				copy(run[i:i+4], src[j:j+4])
			}
		default:
			for i, j := 0, 0; i < len(run); i, j = i+int(w), j+step {
				copy(run[i:i+int(w)], src[j:])
			}
		}
		dst, at[inner], off = dst[n*w:], at[inner]+n, off+n*strides[inner]
		for i := inner; i > 0 && at[i] == shape[i]; i-- { // the last axis runs fastest
			at[i], off = 0, off-shape[i]*strides[i]+strides[i-1]
			at[i-1]++
		}
	}
}

// Reader returns the bytes of the tensor, row by row, from a window, which is borrowed until
// they have been read. Before the first of them intact, unless it is nil, checks the window.
func (s Strided) Reader(window []byte, intact func() error) io.Reader {
	return &lazy{open: func() (r io.Reader, err error) {
		size, _ := s.Bytes() // whoever knows the window has checked it
		if intact != nil {
			err = intact()
		}
		return bufio.NewReaderSize(&gathering{s, window, 0, size}, readAhead), err
	}}
}

// gathering reads for a p of readAhead bytes or more.
type gathering struct {
	Strided
	window   []byte
	at, size int64 // bytes of the tensor: so far, and all
}

func (g *gathering) Read(p []byte) (int, error) {
	w := int64(g.DType.Bits() / 8)
	n := min(int64(len(p))/w*w, g.size-g.at)
	g.Gather(p[:n], g.window, g.at/w)
	if g.at += n; g.at == g.size { // who has every byte may not read on to EOF
		g.window = nil
	}
	if n == 0 {
		return 0, io.EOF
	}
	return int(n), nil
}
