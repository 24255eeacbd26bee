//go:build linux && cgo

package cuda

import (
	"errors"
	"log/slog"
	"slices"
	"sync"
	"unsafe"

	"github.com/tensorferry/tensorferry/slab"
)

// #include "driver.h"
import "C"

// pinned is the backing of a host's pool: memory outside the Go heap that the driver
// has locked, so that a device copies it while the host does something else. It is cut
// from pieces, which are locked whole, beside those who take memory, and stay locked until
// the context ends: to lock little at a time takes long, and to unlock waits for every kernel
// on the device. Memory that is not locked, yet or because the driver refuses, is ordinary:
// copies are slower, and right.
type pinned struct {
	*driver
	most int64 // bytes of pieces to be locked

	calls sync.Mutex // held while the driver locks, and while the context ends; before mu

	mu     sync.Mutex   // guards all below; never held during a call of the driver
	dev    *C.tf_device // nil when its context has ended, or is about to
	pieces []*piece
	bytes  int64 // of pieces to be locked
	warned bool  // that locking was refused
}

// piece is memory of which every copy touches one at most.
type piece struct {
	mem   []byte
	free  []span // ascending, with memory in use between them
	locks bool   // it is locked, or to be, and stays mapped until the context has ended
	is    bool   // the device's context knows it
}

type span struct{ at, n int }

// begin locks the first piece.
func (p *pinned) begin() error {
	p.mu.Lock()
	q, err := p.grow(0)
	p.mu.Unlock()
	if err == nil && q.locks {
		p.lock(q)
	}
	return err
}

// Alloc implements slab.Backing.
func (p *pinned) Alloc(n int) ([]byte, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, q := range p.pieces {
		if mem := q.take(n); mem != nil {
			return mem, nil
		}
	}
	q, err := p.grow(n)
	if err != nil {
		return nil, err
	}
	if q.locks {
		go p.lock(q) // ends with the driver's answer
	}
	return q.take(n), nil
}

// grow maps another piece that has n bytes; mu is held.
func (p *pinned) grow(n int) (*piece, error) {
	q := &piece{}
	size := int64(whole(n))
	if more := max(size, min(pieceBytes, p.most-p.bytes)); p.dev != nil && p.bytes+more <= p.most {
		size, q.locks = more, true
	}
	at := C.tf_map(C.size_t(size))
	if at == nil {
		return nil, errors.New("cuda: the system maps no more memory")
	}
	q.mem, q.free = unsafe.Slice((*byte)(at), size), []span{{0, int(size)}}
	if p.pieces = append(p.pieces, q); q.locks {
		p.bytes += size
	}
	return q, nil
}

// lock has the driver lock a piece.
func (p *pinned) lock(q *piece) {
	p.calls.Lock()
	defer p.calls.Unlock()
	p.mu.Lock()
	dev := p.dev
	p.mu.Unlock()
	if dev == nil {
		return
	}
	err := p.failed(C.tf_register(dev, unsafe.Pointer(unsafe.SliceData(q.mem)), C.size_t(len(q.mem))))
	p.mu.Lock()
	defer p.mu.Unlock()
	q.is = err == nil
	if r, ok := errors.AsType[*resultError](err); ok && !sticky[r.code] && !p.warned {
		p.warned = true
		p.log.Warn("the driver locks no memory; copies will be slower", slog.Any("cause", err))
	}
}

// Free implements slab.Backing.
func (p *pinned) Free(mem []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	at := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	i := slices.IndexFunc(p.pieces, func(q *piece) bool { return at-q.base() < uintptr(len(q.mem)) })
	if i < 0 {
		panic("cuda: memory is freed that was not mapped")
	}
	q := p.pieces[i]
	if q.give(span{int(at - q.base()), whole(len(mem))}); q.idle() && !q.locks {
		p.pieces = slices.Delete(p.pieces, i, i+1)
		q.unmap()
	}
}

// close unlocks everything, and runs stop, which ends the context.
func (p *pinned) close(stop func()) {
	dev := p.dev
	p.end(func() {
		p.mu.Lock()
		all := slices.Clone(p.pieces)
		p.mu.Unlock()
		for _, q := range all {
			if q.is { // and so it stays mapped; it changes with calls held
				_ = C.tf_unregister(dev, unsafe.Pointer(unsafe.SliceData(q.mem)))
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
	p.calls.Lock()
	defer p.calls.Unlock()
	stop()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pieces = slices.DeleteFunc(p.pieces, func(q *piece) bool {
		q.locks, q.is = false, false
		if !q.idle() {
			return false
		}
		q.unmap()
		return true
	})
}

// whole rounds bytes up to what pieces are cut into.
func whole(n int) int { return max(1, (n+granule-1)/granule) * granule }

func (q *piece) base() uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(q.mem))) }

// take returns n bytes, nil if there are not as many in a row.
func (q *piece) take(n int) []byte {
	size := whole(n)
	i := slices.IndexFunc(q.free, func(f span) bool { return f.n >= size })
	if i < 0 {
		return nil
	}
	at := q.free[i].at
	if q.free[i].n -= size; q.free[i].n == 0 {
		q.free = slices.Delete(q.free, i, i+1)
	} else {
		q.free[i].at += size
	}
	return q.mem[at : at+n : at+n]
}

// give takes memory back, and joins it with what is free beside it.
func (q *piece) give(s span) {
	i, _ := slices.BinarySearchFunc(q.free, s, func(f, s span) int { return f.at - s.at })
	q.free = slices.Insert(q.free, i, s)
	for _, i := range []int{i, i - 1} {
		if i >= 0 && i+1 < len(q.free) && q.free[i].at+q.free[i].n == q.free[i+1].at {
			q.free[i].n += q.free[i+1].n
			q.free = slices.Delete(q.free, i+1, i+2)
		}
	}
}

// idle reports whether all of it is free.
func (q *piece) idle() bool { return len(q.free) == 1 && q.free[0].n == len(q.mem) }

func (q *piece) unmap() {
	if C.tf_unmap(unsafe.Pointer(unsafe.SliceData(q.mem)), C.size_t(len(q.mem))) != 0 {
		panic("cuda: memory is unmapped that was not mapped")
	}
}

var _ slab.Backing = (*pinned)(nil)
