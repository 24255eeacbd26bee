package tensorfile

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// mapFile maps the first size bytes of a file read-only. The bytes are lent until closeMap
// runs, also after f is closed.
func mapFile(f *os.File, size int) (data []byte, closeMap func() error, err error) {
	if size == 0 { // mmap refuses a length of 0
		return nil, func() error { return nil }, nil
	}
	data, err = unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, nil, fmt.Errorf("tensorfile: map %s: %w", f.Name(), err)
	}
	return data, func() error { return unix.Munmap(data) }, nil
}
