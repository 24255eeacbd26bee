package files

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

func TestTensorsOfAFileMayComeInAnyOrderAndAppearTogether(t *testing.T) {
	path := filepath.Join(t.TempDir(), "all.safetensors")
	out, err := NewTarget(path, false, nil)
	require.NoError(t, err)
	defer out.Abandon()
	writers, err := out.Begin([]tensorfile.Entry{
		{Name: "bytes", Desc: tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{3}}},
		{Name: "none", Desc: tensor.Desc{DType: tensor.Int16, Shape: tensor.Shape{0}}},
		{Name: "wide", Desc: tensor.Desc{DType: tensor.Float64, Shape: tensor.Shape{2}}},
	}, tensorfile.Document{})
	require.NoError(t, err)
	write := func(i int, p []byte) {
		t.Helper()
		n, err := writers[i].Write(p)
		require.NoError(t, err)
		require.Equal(t, len(p), n)
	}
	wide := []byte("0123456789abcdef")
	write(2, wide[:5])
	write(0, []byte("ab"))
	write(2, wide[5:])
	write(1, nil)
	_, err = writers[0].Write([]byte("cd"))
	require.ErrorContains(t, err, `too many bytes for tensor "bytes"`)
	require.ErrorContains(t, out.Commit(), `tensor "bytes" is missing its last 1 bytes`)
	require.NoFileExists(t, path)
	write(0, []byte("c"))
	require.NoError(t, out.Commit())

	s, err := tensorfile.OpenSafetensors(path)
	require.NoError(t, err)
	defer s.Close()
	for name, want := range map[string][]byte{"bytes": []byte("abc"), "none": {}, "wide": wide} {
		got, err := s.Tensor(name)
		require.NoError(t, err)
		require.Equal(t, want, got.Data)
	}
}

func TestAnOutputThatIsNotCommittedLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"x.npy", "x.safetensors", "x.bin"} {
		out, err := NewTarget(filepath.Join(dir, name), name == "x.bin", nil)
		require.NoError(t, err)
		w, err := out.Open("x", tensor.Desc{DType: tensor.Int32, Shape: tensor.Shape{2}}, nil)
		require.NoError(t, err)
		_, err = w.Write(make([]byte, 7))
		require.NoError(t, err)
		require.ErrorContains(t, out.Commit(), "is missing its last 1 bytes")
		out.Abandon()
		out.Abandon()
	}
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestOnlyASafetensorsFileTakesSeveralTensors(t *testing.T) {
	two := []tensorfile.Entry{{Name: "a", Desc: tensor.Desc{DType: tensor.Int8}}, {Name: "b", Desc: tensor.Desc{DType: tensor.Int8}}}
	var stdout bytes.Buffer
	for _, path := range []string{filepath.Join(t.TempDir(), "x.npy"), "-"} {
		out, err := NewTarget(path, false, &stdout)
		require.NoError(t, err)
		_, err = out.Begin(two, tensorfile.Document{})
		require.ErrorContains(t, err, "takes one tensor, not 2")
		require.Equal(t, fail.ExitUsage, fail.ExitCode(t.Context(), err))
		out.Abandon()
	}
	require.Zero(t, stdout.Len())
	out, err := NewTarget(filepath.Join(t.TempDir(), "x.safetensors"), false, nil)
	require.NoError(t, err)
	defer out.Abandon()
	_, err = out.Begin([]tensorfile.Entry{two[0], two[0]}, tensorfile.Document{})
	require.ErrorIs(t, err, tensorfile.ErrFormat)
}

// shielded returns a file that may be written, in a folder that may not.
func shielded(t *testing.T) string {
	t.Helper()
	if os.Getuid() == 0 {
		t.Skip("root may write every folder")
	}
	dir := filepath.Join(t.TempDir(), "ro")
	require.NoError(t, os.Mkdir(dir, 0o700))
	path := filepath.Join(dir, "y.npy")
	require.NoError(t, os.WriteFile(path, []byte("old"), 0o600))
	require.NoError(t, os.Chmod(dir, 0o500))
	t.Cleanup(func() { _ = os.Chmod(dir, 0o700) })
	return path
}

func TestAFileInAFolderThatMayNotBeChangedIsWrittenInPlace(t *testing.T) {
	path := shielded(t)
	_, err := NewTarget(path+".npy", false, nil)
	require.ErrorContains(t, err, "permission denied", "there is no such file, and none can be made")
	out, err := NewTarget(path, false, nil)
	require.NoError(t, err)
	defer out.Abandon()
	w, err := out.Open("x", tensor.Desc{DType: tensor.Int8, Shape: tensor.Shape{2}}, nil)
	require.NoError(t, err)
	_, err = w.Write([]byte("ab"))
	require.NoError(t, err)
	old, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "old", string(old), "until it is whole")
	require.NoError(t, out.Commit())
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "ab", string(got[len(got)-2:]))
	left, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, left, 1)
}
