package slab

import "golang.org/x/sys/unix"

// allocate maps memory outside the Go heap, so that 256 MiB of tensors do not
// make the collector let 256 MiB of garbage stand, and asks for huge pages.
func allocate(n int) (mem []byte, mapped bool) {
	if n >= mapFrom {
		if m, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err == nil {
			// Best effort: without huge pages the slab is slower, not wrong.
			_ = unix.Madvise(m, unix.MADV_HUGEPAGE)
			return m, true
		}
	}
	return make([]byte, n), false
}

func unmap(mem []byte) {
	if err := unix.Munmap(mem); err != nil {
		panic("slab: unmap: " + err.Error()) // only a slice that was not mapped
	}
}
