//go:build unix

package codec

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/fault"
)

// A source that can not be read, such as a mapped file that was cut, panics; the
// scratch comes back all the same.
func TestAPanicGivesTheScratchBack(t *testing.T) {
	gone, err := syscall.Mmap(-1, 0, 64<<10, syscall.PROT_NONE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	require.NoError(t, err)
	defer func() { require.NoError(t, syscall.Munmap(gone)) }()
	for range 2 * cap(encoding) {
		require.ErrorIs(t, fault.Guard(func() { LZ4.Encode([][]byte{gone}) }), fault.ErrVanished)
	}
	require.Len(t, encoding, cap(encoding))
}
