package files

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// mounted mounts something over itself until the test ends.
func mounted(t *testing.T, path string) {
	t.Helper()
	if err := unix.Mount(path, path, "", unix.MS_BIND, ""); err != nil {
		t.Skipf("the system refuses it: %v", err)
	}
	t.Cleanup(func() { require.NoError(t, unix.Unmount(path, 0)) })
}

func TestAFileThatIsMountedIsWrittenInPlace(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "y.bin")
	require.NoError(t, os.WriteFile(path, []byte("old and longer"), 0o600))
	mounted(t, path)
	out, err := NewTarget(path, true, nil)
	require.NoError(t, err)
	defer out.Abandon()
	w, err := out.Open("x", tensor.Desc{DType: tensor.Int8, Shape: tensor.Shape{2}}, nil)
	require.NoError(t, err)
	_, err = w.Write([]byte("ab"))
	require.NoError(t, err)
	require.NoError(t, out.Commit())
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "ab", string(got))
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, left, 1)
}

func TestAnEmptyFolderThatIsMountedTakesAModel(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "m")
	require.NoError(t, os.Mkdir(dir, 0o700))
	mounted(t, dir)
	out, err := NewFolderTarget(dir)
	require.NoError(t, err)
	defer out.Abandon()
	const index = "model.safetensors.index.json"
	document, err := tensorfile.ParseDocument(tensorfile.Document{Index: index, Text: `{"weight_map":{"a":"a.safetensors"}}`, Shards: map[string]map[string]string{"a.safetensors": {}}}.Encode())
	require.NoError(t, err)
	writers, err := out.Begin([]tensorfile.Entry{{Name: "a", Desc: tensor.Desc{DType: tensor.Int8, Shape: tensor.Shape{1}}}}, document)
	require.NoError(t, err)
	_, err = writers[0].Write([]byte("x"))
	require.NoError(t, err)
	require.NoError(t, out.Commit())
	out.Abandon()
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, left, 2)
	require.FileExists(t, filepath.Join(dir, "a.safetensors"))
	require.FileExists(t, filepath.Join(dir, index))
	require.NoDirExists(t, out.temp)
}
