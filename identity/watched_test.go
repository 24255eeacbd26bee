package identity

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// TestAFileThatCannotBeReadIsTriedAgain has a file whose stamps stay when it can be read, as
// after chmod on some systems.
func TestAFileThatCannotBeReadIsTriedAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	write := func(text string) {
		require.NoError(t, os.WriteFile(path+".new", []byte(text), 0o600))
		require.NoError(t, os.Rename(path+".new", path))
	}
	write("1")
	synctest.Test(t, func(t *testing.T) {
		var fails error
		var log strings.Builder
		w, err := watch(slog.New(slog.NewTextHandler(&log, nil)), func(bool) (string, error) {
			b, err := os.ReadFile(path)
			return string(b), errors.Join(err, fails)
		}, path)
		require.NoError(t, err)
		require.Equal(t, "1", w.get())
		for _, c := range []struct {
			text  string // "" leaves the file
			fails error
			want  string
			told  bool
		}{
			{"2", os.ErrPermission, "1", true},
			{"", os.ErrPermission, "1", false},
			{"", os.ErrInvalid, "1", true},
			{"3", os.ErrInvalid, "1", true},
			{"", nil, "3", false},
			{"4", nil, "4", false},
			{"5", os.ErrInvalid, "4", true},
		} {
			if c.text != "" {
				write(c.text)
			}
			fails = c.fails
			time.Sleep(lookEvery)
			log.Reset()
			require.Equal(t, c.want, w.get())
			require.Equal(t, c.told, log.Len() > 0)
		}
	})
}
