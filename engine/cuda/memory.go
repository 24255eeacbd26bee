//go:build linux && cgo

package cuda

import (
	"errors"
	"log/slog"
	"sync"
	"unsafe"

	"github.com/tensorferry/tensorferry/slab"
)

// #include "driver.h"
import "C"

// pinned is the backing of a host's pool: memory outside the Go heap that the driver
// has locked, so that a device copies it while the host does something else. Where
// locking is refused, the memory is ordinary: copies are slower, and right.
type pinned struct {
	*driver

	mu    sync.Mutex   // guards all below, and the registrations
	dev   *C.tf_device // nil when its context has ended, or is about to
	all   map[*byte]*locked
	warns bool // that locking was refused is yet to be said
}

// locked is a piece of memory.
type locked struct {
	mem  []byte
	is   bool // the device's context knows it
	free bool // nobody else does: to be unmapped when the context goes
}

func newPinned(d *driver, dev *C.tf_device) *pinned {
	return &pinned{driver: d, dev: dev, all: make(map[*byte]*locked), warns: true}
}

// Alloc implements slab.Backing.
func (p *pinned) Alloc(n int) ([]byte, error) {
	at := C.tf_map(C.size_t(n))
	if at == nil {
		return nil, errors.New("cuda: the system maps no more memory")
	}
	mem := unsafe.Slice((*byte)(at), n)
	l := &locked{mem: mem}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all[unsafe.SliceData(mem)] = l
	p.lock(l)
	return mem, nil
}

// lock has the driver lock a piece; mu is held.
func (p *pinned) lock(l *locked) {
	if p.dev == nil {
		return
	}
	err := p.failed(C.tf_register(p.dev, unsafe.Pointer(unsafe.SliceData(l.mem)), C.size_t(len(l.mem))))
	l.is = err == nil
	var r *resultError
	if errors.As(err, &r) && !sticky[r.code] && p.warns {
		p.warns = false
		p.log.Warn("the driver locks no memory; copies will be slower", slog.Any("cause", err))
	}
}

// Free implements slab.Backing.
func (p *pinned) Free(mem []byte) {
	at := unsafe.SliceData(mem)
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.all[at]
	// A dead context refuses, and lets go when it is reset. Other memory at the same
	// address would be taken for this one until then.
	if l.is && (p.dev == nil || C.tf_unregister(p.dev, unsafe.Pointer(at)).code != C.CUDA_SUCCESS) {
		l.free = true
		return
	}
	p.unmap(l)
}

// unmap forgets a piece; mu is held.
func (p *pinned) unmap(l *locked) {
	at := unsafe.SliceData(l.mem)
	delete(p.all, at)
	if C.tf_unmap(unsafe.Pointer(at), C.size_t(len(l.mem))) != 0 {
		panic("cuda: memory is freed that was not mapped")
	}
}

// close unlocks everything, and runs stop, which ends the context.
func (p *pinned) close(stop func()) {
	dev := p.dev
	p.end(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		for at, l := range p.all {
			if l.is {
				_ = C.tf_unregister(dev, unsafe.Pointer(at))
			}
		}
		stop()
	})
}

// end runs stop, after which no context knows any memory: that is ordinary from then on.
func (p *pinned) end(stop func()) {
	p.mu.Lock()
	p.dev = nil
	p.mu.Unlock()
	stop() // may take long
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, l := range p.all {
		if l.is = false; l.free {
			p.unmap(l)
		}
	}
}

var _ slab.Backing = (*pinned)(nil)
