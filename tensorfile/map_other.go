//go:build !linux

package tensorfile

import (
	"fmt"
	"io"
	"os"
)

// mapFile reads the file into memory: only Linux maps it.
func mapFile(f *os.File, size int) (data []byte, closeMap func() error, err error) {
	data = make([]byte, size)
	if _, err := io.ReadFull(io.NewSectionReader(f, 0, int64(size)), data); err != nil {
		return nil, nil, fmt.Errorf("tensorfile: read %s: %w", f.Name(), err)
	}
	return data, func() error { return nil }, nil
}
