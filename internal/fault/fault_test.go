//go:build unix

package fault

import (
	"os"
	"runtime/debug"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/testkit"
)

func TestOnlyVanishedMemoryIsForgiven(t *testing.T) {
	before := debug.SetPanicOnFault(false)
	defer debug.SetPanicOnFault(before)
	require.NoError(t, Guard(func() {}))
	require.PanicsWithValue(t, "else", func() { _ = Guard(func() { panic("else") }) })
	require.Panics(t, func() { _ = Guard(func() { _ = make([]byte, 1)[len(os.Args)+1] }) }, "an index out of range is a defect")
	require.False(t, debug.SetPanicOnFault(false), "as it was before")
	from := testkit.CutMapping(t, 8192, 0)
	require.ErrorIs(t, Guard(func() { _ = from[4096] + 1; sink = from[5000] }), ErrVanished)
	require.False(t, debug.SetPanicOnFault(false))
}

var sink byte
