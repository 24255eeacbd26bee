package torchsave

import (
	"math"
	"slices"

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

// layoutOf returns the layout of a tensor that begins offset elements into a storage of n.
func layoutOf(d tensor.Desc, strides []int64, offset, n int64) (Layout, error) {
	l := Layout{Desc: d, Strides: strides}
	if _, err := d.Bytes(); err != nil {
		return l, refused(err)
	}
	if len(strides) != len(d.Shape) {
		return l, malformed("a tensor of rank %d has %d strides", len(d.Shape), len(strides))
	}
	if slices.Contains(d.Shape, 0) { // it has no elements, so strides and offset say nothing
		return l, nil
	}
	last := offset
	for i, step := range strides {
		if most := d.Shape[i] - 1; last < n && step > 0 && most > (n-1-last)/step {
			last = n
		} else if last < n {
			last += most * step
		}
	}
	if last >= n {
		return l, malformed("%v with strides %v at offset %d lies past the end of its storage of %d elements", d, strides, offset, n)
	}
	l.Window = (last - offset + 1) * width(d) // the storage has as many bytes
	return l, nil
}

func width(d tensor.Desc) int64 { return int64(d.DType.Bits() / 8) }

// dense returns the strides of a shape without gaps, as torch has them.
func dense(s tensor.Shape) []int64 {
	strides := make([]int64, len(s))
	step := int64(1)
	for i := len(s) - 1; i >= 0; i-- {
		strides[i] = step
		step *= max(s[i], 1)
	}
	return strides
}

// Dense reports whether the window is the tensor: row-major without gaps.
func (l Layout) Dense() bool {
	shape, strides := l.axes()
	return l.Window == 0 || len(shape) == 0 || len(shape) == 1 && strides[0] == 1
}

// axes returns the axes as few as they can be: none of one element, and none that goes on
// where the next one ends.
func (l Layout) axes() (shape, strides []int64) {
	for i, dim := range l.Shape {
		last := len(shape) - 1
		switch {
		case dim == 1:
		case last >= 0 && l.Strides[i] <= math.MaxInt64/dim && strides[last] == dim*l.Strides[i]:
			shape[last], strides[last] = shape[last]*dim, l.Strides[i]
		default:
			shape, strides = append(shape, dim), append(strides, l.Strides[i])
		}
	}
	return shape, strides
}

// Gather copies the elements from a window into dst, row-major. dst has as many bytes as
// Desc says, window as many as Window does.
func (l Layout) Gather(dst, window []byte) { l.gather(dst, window, 0) }

// gather fills dst, which has whole elements, beginning with the tensor's element from.
func (l Layout) gather(dst, window []byte, from int64) {
	shape, strides := l.axes()
	if len(shape) == 0 {
		shape, strides = []int64{1}, []int64{1}
	}
	w := width(l.Desc)
	inner := len(shape) - 1
	at, off := make([]int64, len(shape)), int64(0)
	for i := inner; i >= 0; i-- {
		at[i] = from % shape[i]
		from /= shape[i]
		off += at[i] * strides[i]
	}
	for len(dst) > 0 {
		n := min(shape[inner]-at[inner], int64(len(dst))/w)
		if step := strides[inner]; step == 1 {
			copy(dst[:n*w], window[off*w:])
		} else {
			strided(dst[:n*w], window[off*w:], int(w), int(step*w))
		}
		dst = dst[n*w:]
		at[inner], off = at[inner]+n, off+n*strides[inner]
		for i := inner; i > 0 && at[i] == shape[i]; i-- { // the last axis runs fastest
			at[i], off = 0, off-shape[i]*strides[i]+strides[i-1]
			at[i-1]++
		}
	}
}

// strided copies elements of w bytes that lie step bytes apart.
func strided(dst, src []byte, w, step int) {
	switch w { // a copy of constant length is one instruction
	case 4:
		for i, j := 0, 0; i < len(dst); i, j = i+4, j+step {
			copy(dst[i:i+4], src[j:j+4])
		}
	case 2:
		for i, j := 0, 0; i < len(dst); i, j = i+2, j+step {
			copy(dst[i:i+2], src[j:j+2])
		}
	default:
		for i, j := 0, 0; i < len(dst); i, j = i+w, j+step {
			copy(dst[i:i+w], src[j:j+w])
		}
	}
}
