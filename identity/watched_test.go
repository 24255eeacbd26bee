package identity

import (
	"errors"
	"os"
	"path/filepath"
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
		w := watched[string]{paths: []string{path}, make: func() (string, error) {
			b, err := os.ReadFile(path)
			return string(b), errors.Join(err, fails)
		}}
		got, err := w.get()
		require.NoError(t, err)
		require.Equal(t, "1", got)
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
			got, err := w.get()
			require.Equal(t, c.want, got)
			require.Equal(t, c.told, err != nil)
		}
	})
}
