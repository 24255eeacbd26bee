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
	path := filepath.Join(t.TempDir(), "cut")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("testkit: %v", err)
		}
	}
	must(os.WriteFile(path, make([]byte, n), 0o600))
	f, err := os.Open(path)
	must(err)
	defer f.Close()
	data, err := syscall.Mmap(int(f.Fd()), 0, n, syscall.PROT_READ, syscall.MAP_SHARED)
	must(err)
	t.Cleanup(func() { must(syscall.Munmap(data)) })
	must(os.Truncate(path, left))
	return data
}
