package slab

import "golang.org/x/sys/unix"

// Alloc maps memory outside the Go heap, so that 256 MiB of tensors do not make
// the collector let 256 MiB of garbage stand, and asks for huge pages.
func (system) Alloc(n int) ([]byte, error) {
	if n < mapFrom {
		return make([]byte, n), nil
	}
	mem, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, err
	}
	// Best effort: without huge pages the slab is slower, not wrong.
	_ = unix.Madvise(mem, unix.MADV_HUGEPAGE)
	return mem, nil
}

// Free unmaps what Alloc mapped.
func (system) Free(mem []byte) {
	if len(mem) < mapFrom {
		return
	}
	if err := unix.Munmap(mem); err != nil {
		panic("slab: unmap: " + err.Error()) // only a slice that was not mapped
	}
}

// Discard tells the system that whole pages of memory from System hold nothing: it has
// them until they are written to again. It borrows mem.
func Discard(mem []byte) {
	// Best effort: without it the memory stays resident.
	_ = unix.Madvise(mem, unix.MADV_DONTNEED)
}
