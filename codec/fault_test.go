//go:build unix

package codec

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/fault"
	"github.com/tensorferry/tensorferry/internal/testkit"
)

// A source that can not be read, such as a mapped file that was cut, panics; the
// scratch comes back all the same.
func TestAPanicGivesTheScratchBack(t *testing.T) {
	gone := testkit.CutMapping(t, 64<<10, 0)
	for range 2 * cap(encoding) {
		require.ErrorIs(t, fault.Guard(func() { LZ4.Encode([][]byte{gone}) }), fault.ErrVanished)
	}
	require.Len(t, encoding, cap(encoding))
}
