//go:build linux && cgo

package cuda

// #include "driver.h"
import "C"

import (
	"reflect"
	"unsafe"

	"github.com/tensorferry/tensorferry/engine/cuda/kernels"
)

// add appends a launch of a kernel, whose parameters it copies.
func add[K kernels.Launch](l *lane, k K) {
	l.list = append(l.list, l.device.kernels[reflect.TypeFor[K]()])
	c := &l.list[len(l.list)-1]
	grid, block := k.Grid()
	for i := range 3 {
		c.grid[i], c.block[i] = C.unsigned(grid[i]), C.unsigned(block[i])
	}
	*(*K)(unsafe.Pointer(&c.bytes)) = k
}

// empty is a launch without parameters. It says where they go: Go lays them out as C does.
func empty(f C.CUfunction, t reflect.Type) C.tf_launch {
	if t.NumField() > C.TF_PARAMS || t.Size() > C.TF_PARAM_BYTES {
		panic("cuda: kernel " + t.Name() + " has more parameters than a launch has room for")
	}
	l := C.tf_launch{function: f, params: C.unsigned(t.NumField())}
	for i := range t.NumField() {
		l.offsets[i] = C.unsigned(t.Field(i).Offset)
	}
	return l
}
