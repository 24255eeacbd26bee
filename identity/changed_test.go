package identity_test

import (
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/identity"
)

// TestAFileThatKeepsItsSizeAndTimeIsReadAgain overwrites a token with one of its length, and
// sets the time of modification to what it was.
func TestAFileThatKeepsItsSizeAndTimeIsReadAgain(t *testing.T) {
	dir := files(t)
	path := serverFiles(dir).Tokens
	s, err := identity.NewServer(serverFiles(dir), slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	info, client, server := shake(t, s, clientFiles(dir), "localhost")
	require.NoError(t, client)
	require.NoError(t, server)
	before, err := os.ReadFile(path)
	require.NoError(t, err)
	stamp, err := os.Stat(path)
	require.NoError(t, err)
	before[len(before)-2]++ // the end of carol's token
	require.Eventually(t, func() bool {
		require.NoError(t, os.WriteFile(path, before, 0o600))
		require.NoError(t, os.Chtimes(path, stamp.ModTime(), stamp.ModTime()))
		_, err := s.Principal(info, []string{"Bearer " + carol})
		return err != nil
	}, 10*time.Second, 10*time.Millisecond)
}
