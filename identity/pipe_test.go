//go:build unix

package identity

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestAPipeInPlaceOfAFileHoldsUpNobody replaces a file with a pipe that nobody writes to, and
// the pipe with the file, while they are read.
func TestAPipeInPlaceOfAFileHoldsUpNobody(t *testing.T) {
	dir := t.TempDir()
	file, pipe, path := filepath.Join(dir, "file"), filepath.Join(dir, "pipe"), filepath.Join(dir, "path")
	require.NoError(t, os.WriteFile(file, []byte("text"), 0o600))
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	require.NoError(t, os.Link(file, path))
	read := make(chan struct{})
	go func() {
		defer close(read)
		for range 10000 {
			_, _ = readFile(path)
		}
	}()
	late := time.After(20 * time.Second)
	for {
		for _, now := range []string{pipe, file} {
			require.NoError(t, os.Link(now, path+".new"))
			require.NoError(t, os.Rename(path+".new", path))
		}
		select {
		case <-read:
			_, err := readFile(pipe)
			require.ErrorContains(t, err, "is not a regular file")
			return
		case <-late:
			require.Fail(t, "a pipe is waited for")
		default:
		}
	}
}
