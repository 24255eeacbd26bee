package harness

import (
	"errors"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/testkit"
)

func TestACommitIsCheckedOutBesideTheTree(t *testing.T) {
	testkit.Start(t)
	top, err := Top(t.Context())
	if exit := new(exec.ExitError); errors.Is(err, exec.ErrNotFound) || errors.As(err, &exit) {
		t.Skip("not in a repository")
	}
	require.NoError(t, err)
	dir := filepath.Join(t.TempDir(), "source")
	require.NoError(t, Checkout(t.Context(), "HEAD", dir))
	require.FileExists(t, filepath.Join(dir, "go.mod"))
	require.NoFileExists(t, dir+".index")
	require.FileExists(t, filepath.Join(top, "go.mod"))
}

func TestAMissingCommitIsAnErrorThatSaysHowToFetchIt(t *testing.T) {
	testkit.Start(t)
	t.Chdir(t.TempDir())
	err := Checkout(t.Context(), "v0", filepath.Join(t.TempDir(), "source"))
	require.ErrorContains(t, err, `commit "v0" is not in this repository`)
	require.ErrorContains(t, err, "git fetch --unshallow --tags")
}
