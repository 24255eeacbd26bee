//go:build !linux

package tensorfile

import (
	"fmt"
	"io"
)

// mapFile reads the file into memory: only Linux maps it.
func mapFile(path string) (data []byte, closeMap func() error, err error) {
	f, size, err := openFile(path)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close() //nolint:errcheck // opened for reading
	data = make([]byte, size)
	if _, err := io.ReadFull(f, data); err != nil {
		return nil, nil, fmt.Errorf("tensorfile: read %s: %w", path, err)
	}
	return data, func() error { return nil }, nil
}
