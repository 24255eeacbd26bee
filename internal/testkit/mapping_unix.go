//go:build unix

package testkit

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// CutMapping lends, until the test ends, a mapped file of n zero bytes that has been
// cut to left since: to read a page behind them is a fault.
func CutMapping(t testing.TB, n int, left int64) []byte {
	t.Helper()
	f := Must(os.Create(filepath.Join(t.TempDir(), "cut")))
	defer f.Close()
	Must(0, f.Truncate(int64(n)))
	data := Must(syscall.Mmap(int(f.Fd()), 0, n, syscall.PROT_READ, syscall.MAP_SHARED))
	t.Cleanup(func() { Must(0, syscall.Munmap(data)) })
	Must(0, f.Truncate(left))
	return data
}
