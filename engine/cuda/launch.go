//go:build linux && cgo

package cuda

// #include "driver.h"
import "C"

import (
	"reflect"
	"sync"
	"unsafe"

	"github.com/tensorferry/tensorferry/engine/cuda/kernels"
)

// launcher collects what a block launches. It belongs to the submitter.
type launcher struct {
	device *device
	list   []C.tf_launch
}

// add appends a launch of a kernel, whose parameters it copies.
func add[K kernels.Launch](l *launcher, k K) {
	t := reflect.TypeFor[K]()
	l.list = append(l.list, C.tf_launch{function: l.device.functions[t]})
	c := &l.list[len(l.list)-1]
	grid, block := k.Grid()
	for i := range 3 {
		c.grid[i], c.block[i] = C.unsigned(grid[i]), C.unsigned(block[i])
	}
	p := paramsOf(t)
	c.params, c.offsets = p.n, p.offsets
	*(*K)(unsafe.Pointer(&c.bytes)) = k
}

// params says where the parameters of a kernel are: a struct of Go lays them out as
// C does.
type params struct {
	n       C.unsigned
	offsets [C.TF_PARAMS]C.unsigned
}

var known sync.Map // params by reflect.Type

func paramsOf(t reflect.Type) params {
	if p, ok := known.Load(t); ok {
		return p.(params)
	}
	if t.NumField() > C.TF_PARAMS || t.Size() > C.TF_PARAM_BYTES {
		panic("cuda: kernel " + t.Name() + " has more parameters than a launch has room for")
	}
	p := params{n: C.unsigned(t.NumField())}
	for i := range t.NumField() {
		p.offsets[i] = C.unsigned(t.Field(i).Offset)
	}
	known.Store(t, p)
	return p
}
