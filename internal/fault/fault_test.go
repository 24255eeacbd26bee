//go:build unix

package fault

import (
	"os"
	"path/filepath"
	"runtime/debug"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestOnlyVanishedMemoryIsForgiven(t *testing.T) {
	before := debug.SetPanicOnFault(false)
	defer debug.SetPanicOnFault(before)
	require.NoError(t, Guard(func() {}))
	require.PanicsWithValue(t, "else", func() { _ = Guard(func() { panic("else") }) })
	require.Panics(t, func() { _ = Guard(func() { _ = make([]byte, 1)[len(os.Args)+1] }) }, "an index out of range is a defect")
	require.False(t, debug.SetPanicOnFault(false), "as it was before")
	from := shortened(t, 8192)
	require.ErrorIs(t, Guard(func() { _ = from[4096] + 1; sink = from[5000] }), ErrVanished)
	require.False(t, debug.SetPanicOnFault(false))
}

var sink byte

// shortened maps a file of n bytes that is then cut to none.
func shortened(t *testing.T, n int) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "x")
	require.NoError(t, os.WriteFile(path, make([]byte, n), 0o600))
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	data, err := syscall.Mmap(int(f.Fd()), 0, n, syscall.PROT_READ, syscall.MAP_SHARED)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, syscall.Munmap(data)) })
	require.NoError(t, os.Truncate(path, 0))
	return data
}
