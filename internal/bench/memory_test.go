package bench

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/testkit"
)

func TestStreamedBlocksAreComparedByteByByte(t *testing.T) {
	const size = 3 * MemoryBlock
	result := func(change func([]byte) []byte) error {
		var b bytes.Buffer
		require.NoError(t, writeBlocks(&b, size))
		Rectify(b.Bytes())
		return checkBlocks(bytes.NewReader(change(b.Bytes())), size, func(int64) error { return nil })
	}
	require.NoError(t, result(func(b []byte) []byte { return b }))
	for name, change := range map[string]func([]byte) []byte{
		"a bit is wrong":     func(b []byte) []byte { b[size-1] ^= 1; return b },
		"a byte is missing":  func(b []byte) []byte { return b[:size-1] },
		"a byte is too much": func(b []byte) []byte { return append(b, 0) },
		"nothing came":       func([]byte) []byte { return nil },
		"two blocks are turned": func(b []byte) []byte {
			return append(b[MemoryBlock:2*MemoryBlock:2*MemoryBlock], append(b[:MemoryBlock:MemoryBlock], b[2*MemoryBlock:]...)...)
		},
	} {
		require.Error(t, result(change), name)
	}
}

func TestMemoryMeasureTellsOfAServerThatDoesNotStart(t *testing.T) {
	testkit.Start(t)
	self, err := os.Executable()
	require.NoError(t, err)
	_, err = Config{Command: func(ctx context.Context, _ ...string) *exec.Cmd {
		return exec.CommandContext(ctx, self, "-no-such-flag")
	}}.PeakMemory(t.Context(), "unix", MemoryBlock)
	require.ErrorContains(t, err, "where it listens")
	require.ErrorContains(t, err, "no-such-flag")
}
