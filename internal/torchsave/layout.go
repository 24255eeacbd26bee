package torchsave

import (
	"math"
	"slices"

	"github.com/tensorferry/tensorferry/tensor"
)

// Layout is how a tensor lies in the storage of a file.
type Layout struct {
	tensor.Desc
	// Strides are the distances of neighbors along each axis in elements, 0 or more.
	Strides []int64
	// Window is the number of bytes from the tensor's first element to its last one, inclusive:
	// what a Reader hands out. It is 0 for a tensor without elements.
	Window int64
}

func width(d tensor.Desc) int64 { return int64(d.DType.Bits() / 8) }

// layoutOf returns the layout of a tensor that begins offset elements into a storage of n.
func layoutOf(d tensor.Desc, strides []int64, offset, n int64) (Layout, error) {
	l := Layout{Desc: d, Strides: strides}
	if _, err := d.Bytes(); err != nil {
		return l, malformed("%w", err)
	}
	if len(strides) != len(d.Shape) {
		return l, malformed("a tensor of rank %d has %d strides", len(d.Shape), len(strides))
	}
	if slices.Contains(d.Shape, 0) { // it has no elements, so strides and offset say nothing
		return l, nil
	}
	last := offset
	for i, step := range strides {
		if most := d.Shape[i] - 1; last >= n || step > 0 && most > (n-1-last)/step {
			last = n
		} else {
			last += most * step
		}
	}
	if last >= n {
		return l, malformed("%v with strides %v at offset %d ends behind its storage of %d elements", d, strides, offset, n)
	}
	l.Window = (last - offset + 1) * width(d) // up to the bytes of the storage
	return l, nil
}

// Dense reports whether the window is the tensor: row-major without gaps.
func (l Layout) Dense() bool {
	if l.Window == 0 {
		return true
	}
	shape, strides := l.axes()
	return len(shape) == 1 && strides[0] == 1
}

// axes returns the axes of a tensor with elements, as few as there can be, but one at least: none of one element, and none
// that goes on where the next one ends.
func (l Layout) axes() (shape, strides []int64) {
	shape, strides = []int64{1}, []int64{1}
	for i, dim := range l.Shape {
		switch last := len(shape) - 1; {
		case dim == 1:
		case shape[last] == 1:
			shape[last], strides[last] = dim, l.Strides[i]
		case l.Strides[i] <= math.MaxInt64/dim && strides[last] == dim*l.Strides[i]:
			shape[last], strides[last] = shape[last]*dim, l.Strides[i]
		default:
			shape, strides = append(shape, dim), append(strides, l.Strides[i])
		}
	}
	return shape, strides
}

// Gather copies elements from a window to dst, row-major: as many as it has room for,
// beginning with element from. It borrows both; dst has room for whole elements.
func (l Layout) Gather(dst, window []byte, from int64) {
	if len(dst) == 0 { // there may be no element
		return
	}
	shape, strides := l.axes()
	w, inner := width(l.Desc), len(shape)-1
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
