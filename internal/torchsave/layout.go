package torchsave

import (
	"slices"

	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// Layout is how a tensor lies in the storage of a file.
type Layout struct {
	tensorfile.Strided
	// Window is the number of bytes from the tensor's first element to its last one, inclusive:
	// what a Reader hands out. It is 0 for a tensor without elements.
	Window int64
}

func width(d tensor.Desc) int64 { return int64(d.DType.Bits() / 8) }

// layoutOf returns the layout of a tensor that begins offset elements into a storage of n.
func layoutOf(d tensor.Desc, strides []int64, offset, n int64) (Layout, error) {
	l := Layout{Strided: tensorfile.Strided{Desc: d, Strides: strides}}
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
