package tensorfile

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// mapFile maps a file read-only. The bytes are lent until closeMap runs.
func mapFile(path string) (data []byte, closeMap func() error, err error) {
	f, size, err := openFile(path)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close() // the map outlives it
	if size == 0 {  // mmap refuses a length of 0
		return nil, func() error { return nil }, nil
	}
	data, err = unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, nil, fmt.Errorf("tensorfile: map %s: %w", path, err)
	}
	return data, func() error { return unix.Munmap(data) }, nil
}
