//go:build linux

package link

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/slab"
)

// FuzzHeap compares a heap with a list of what is in use.
func FuzzHeap(f *testing.F) {
	f.Add([]byte{1, 0, 255, 0, 1, 1, 200, 2, 9, 0, 128, 3})
	f.Fuzz(func(t *testing.T, script []byte) {
		h := NewHeap(1 << 40)
		var used [][]byte
		for ; len(script) >= 2; script = script[2:] {
			if script[1]%3 == 0 && len(used) > 0 {
				i := int(script[0]) % len(used)
				for _, b := range used[i] {
					require.Equal(t, used[i][0], b, "somebody else wrote here")
				}
				h.Free(used[i])
				used = append(used[:i], used[i+1:]...)
				continue
			}
			n := int(slab.SizeOf(int64(script[0]) << (script[1] % 14)))
			mem, err := h.Alloc(n)
			require.NoError(t, err)
			require.Len(t, mem, n)
			for i := range mem {
				mem[i] = byte(len(used) + int(script[0]))
			}
			for i := 1; i < n; i *= 7 {
				r, ok := h.RangeOf(mem[i:])
				require.True(t, ok)
				whole, ok := h.piece(r)
				require.True(t, ok)
				require.Equal(t, Range{r.Memory, r.Off - uint64(i), uint64(n)}, whole)
			}
			used = append(used, mem)
		}
		for _, mem := range used {
			h.Free(mem)
		}
		require.Empty(t, h.segments)
		require.Empty(t, h.places)
		require.Empty(t, h.open)
	})
}

func TestMemoryOfOthersHasNoRange(t *testing.T) {
	testkit.Start(t)
	h := NewHeap(1 << 40)
	mem, err := h.Alloc(4096)
	require.NoError(t, err)
	_, ok := h.RangeOf(make([]byte, 10))
	require.False(t, ok)
	r, ok := h.RangeOf(nil)
	require.True(t, ok)
	require.Zero(t, r)
	require.Panics(t, func() { h.Free(make([]byte, 4096)) })
	require.Panics(t, func() { h.Free(mem[:100]) })
	h.Free(mem)
	_, _, ok = h.descriptor(1)
	require.False(t, ok)
}

func TestAHeapCountsWholeSegments(t *testing.T) {
	testkit.Start(t)
	h := NewHeap(2 * segmentBytes)
	small, err := h.Alloc(4 << 10)
	require.NoError(t, err)
	other, err := h.Alloc(8 << 10)
	require.NoError(t, err)
	_, err = h.Alloc(12 << 10)
	require.ErrorContains(t, err, "4194304 of 4194304 are in use")
	h.Free(small)
	third, err := h.Alloc(12 << 10)
	require.NoError(t, err)
	h.Free(other)
	h.Free(third)
}
