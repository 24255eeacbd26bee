package files

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/memory"
	"github.com/tensorferry/tensorferry/store/storetest"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// putModel writes a .safetensors file of vectors, whose names are their bytes.
func putModel(t *testing.T, path string, metadata map[string]string, names ...string) {
	t.Helper()
	tensors := map[string]string{}
	for _, name := range names {
		tensors[name] = name
	}
	storetest.Place(t, path, storetest.Model(t, metadata, tensors))
}

func TestAStoreBesideOthersIsAStore(t *testing.T) {
	storetest.Run(t, func(t testing.TB) store.Store {
		f, err := Open(t.TempDir(), Config{})
		require.NoError(t, err)
		return Beside(memory.New(testkit.Pool(t), 64<<20), f)
	})
}

func TestAFileThatIsStillCopiedAppearsWhenItIsWhole(t *testing.T) {
	dir := t.TempDir()
	var log bytes.Buffer
	f := storetest.Close(t, testkit.Must(Open(dir, Config{Log: slog.New(slog.NewTextHandler(&log, nil))})))
	data := storetest.Model(t, nil, map[string]string{"x": "\x01\x02\x03"})
	file, err := os.Create(filepath.Join(dir, "m.safetensors"))
	require.NoError(t, err)
	for _, b := range data {
		require.Empty(t, storetest.Names(t, f))
		_, err := file.Write([]byte{b})
		require.NoError(t, err)
	}
	require.NoError(t, file.Close())
	f.scan.settled = true // as if the folder had not changed for a while: the file has
	require.Equal(t, []string{"m/x"}, storetest.Names(t, f))
	require.Equal(t, 1, strings.Count(log.String(), "file=m.safetensors"))
}

func TestAPushDoesNotLookForFiles(t *testing.T) {
	f := testkit.Must(Open(t.TempDir(), Config{}))
	s := storetest.Close(t, Beside(memory.New(testkit.Pool(t), 64<<20), f))
	before := f.scans.Load()
	storetest.Put(t, s, "x", []byte{1})
	storetest.Put(t, s, "x", []byte{2})
	require.Equal(t, []byte{2}, storetest.Get(t, s, "x"))
	storetest.Remove(t, s, "x")
	require.Equal(t, before, f.scans.Load(), "a folder of thousands of files takes 20 ms")
}

// BenchmarkListAfterAPush lists nothing in a folder that has just changed and holds many files
// of pushed tensors, which are skipped.
func BenchmarkListAfterAPush(b *testing.B) {
	for _, count := range []int{1000, 30_000} {
		b.Run(fmt.Sprintf("files=%d", count), func(b *testing.B) {
			dir := b.TempDir()
			for i := range count {
				require.NoError(b, os.WriteFile(filepath.Join(dir, fmt.Sprintf("%05d.safetensors", i)), nil, 0o644))
			}
			f := storetest.Close(b, testkit.Must(Open(dir, Config{Flat: true, Skip: func(string) bool { return true }})))
			for b.Loop() {
				f.scan.settled = false
				require.Empty(b, storetest.Names(b, f))
			}
		})
	}
}

func TestFilesShowTheModelFilesBelowAFolder(t *testing.T) {
	dir := t.TempDir()
	putModel(t, filepath.Join(dir, "top.safetensors"), nil, "x")
	putModel(t, filepath.Join(dir, "a/b/deep.safetensors"), map[string]string{"format": "pt"}, "w", "v/u")
	putModel(t, filepath.Join(dir, ".hidden/no.safetensors"), nil, "x")
	putModel(t, filepath.Join(dir, "several/m-1.safetensors"), map[string]string{"n": "1"}, "p")
	putModel(t, filepath.Join(dir, "several/m-2.safetensors"), nil, "q")
	putModel(t, filepath.Join(dir, "several/other.safetensors"), nil, "r")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "several/m.safetensors.index.json"), []byte(`{"weight_map":{"p":"m-1.safetensors","q":"m-2.safetensors"}}`), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "a/notes.txt"), nil, 0o644))
	require.NoError(t, os.Symlink(filepath.Join(dir, "top.safetensors"), filepath.Join(dir, "a/link.safetensors")))

	f, err := Open(dir, Config{Name: "lib"})
	require.NoError(t, err)
	defer f.Close()
	require.Equal(t, []string{
		"lib/a/b/deep/__metadata__", "lib/a/b/deep/v/u", "lib/a/b/deep/w", "lib/a/link/x",
		"lib/several/m/__metadata__", "lib/several/m/p", "lib/several/m/q", "lib/several/other/r", "lib/top/x",
	}, storetest.Names(t, f))
	require.Equal(t, []byte("v/u"), storetest.Get(t, f, "lib/a/b/deep/v/u"))
	require.Equal(t, []byte("q"), storetest.Get(t, f, "lib/several/m/q"))
	require.Equal(t, []byte(`{"format":"pt"}`), storetest.Get(t, f, "lib/a/b/deep/__metadata__"))
	d, err := tensorfile.ParseDocument(storetest.Get(t, f, "lib/several/m/__metadata__"))
	require.NoError(t, err)
	require.Equal(t, "m.safetensors.index.json", d.Index)
	require.Equal(t, map[string]string{"n": "1"}, d.Shards["m-1.safetensors"])

	r, err := f.Open(t.Context(), "lib/a/b/deep/w")
	require.NoError(t, err)
	require.Equal(t, "a/b/deep.safetensors", r.Info().File)
	sum := codec.Digest{1}
	r.(store.DigestKeeper).Digested(sum)
	r.Release()
	infos, err := f.List(t.Context(), "lib/a/b/deep/w", "", 1)
	require.NoError(t, err)
	require.Equal(t, sum, infos[0].Digest)
}

func TestFilesThatComeAndGoAreSeen(t *testing.T) {
	dir := t.TempDir()
	var log bytes.Buffer
	f, err := Open(dir, Config{Log: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	defer f.Close()
	require.Empty(t, storetest.Names(t, f))
	putModel(t, filepath.Join(dir, "a/m.safetensors"), nil, "x")
	require.Equal(t, []byte("x"), storetest.Get(t, f, "a/m/x"), "found when it is asked for")
	putModel(t, filepath.Join(dir, "a/m.safetensors"), map[string]string{"k": "v"}, "x", "y")
	require.Equal(t, []string{"a/m/__metadata__", "a/m/x", "a/m/y"}, storetest.Names(t, f))
	reader, err := f.Open(t.Context(), "a/m/y")
	require.NoError(t, err)
	defer reader.Release()
	require.NoError(t, os.RemoveAll(filepath.Join(dir, "a")))
	require.Empty(t, storetest.Names(t, f))
	_, err = f.Open(t.Context(), "a/m/x")
	require.ErrorIs(t, err, store.ErrNotFound)
	data, held, err := reader.View(t.Context(), 0, 1)
	require.NoError(t, err)
	require.Equal(t, "y", string(data))
	held.Release()

	require.NoError(t, os.WriteFile(filepath.Join(dir, "m.safetensors.index.json"), []byte(`{"weight_map":{"p":"m-1.safetensors"}}`), 0o644))
	require.Empty(t, storetest.Names(t, f))
	require.Contains(t, log.String(), "m-1.safetensors: no such file")
	putModel(t, filepath.Join(dir, "m-1.safetensors"), nil, "p")
	require.Equal(t, []string{"m/__metadata__", "m/p"}, storetest.Names(t, f), "its last file has come")
	putModel(t, filepath.Join(dir, "m-1.safetensors"), map[string]string{"again": "1"}, "p")
	require.Contains(t, string(storetest.Get(t, f, "m/__metadata__")), "again", "a file of several was replaced")

	require.NoError(t, os.RemoveAll(dir))
	_, err = f.List(t.Context(), "", "", 10)
	require.ErrorIs(t, err, store.ErrUnavailable)
}

func TestFilesHaveAsManyTensorsAsTheLimitSays(t *testing.T) {
	dir := t.TempDir()
	var log bytes.Buffer
	f, err := Open(dir, Config{Log: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	defer f.Close()
	f.limit = 3
	putModel(t, filepath.Join(dir, "b.safetensors"), nil, "x", "y")
	putModel(t, filepath.Join(dir, "c.safetensors"), nil, "x", "y")
	putModel(t, filepath.Join(dir, "d.safetensors"), nil, "x")
	for range 2 {
		require.Equal(t, []string{"b/x", "b/y", "d/x"}, storetest.Names(t, f))
	}
	require.Equal(t, 1, strings.Count(log.String(), "file cannot be used"), "one warning")
	require.Contains(t, log.String(), "file=c.safetensors")
	putModel(t, filepath.Join(dir, "a.safetensors"), nil, "x", "y")
	require.Equal(t, []string{"a/x", "a/y", "d/x"}, storetest.Names(t, f), "as after a restart")
	require.NoError(t, os.Remove(filepath.Join(dir, "a.safetensors")))
	require.NoError(t, os.Remove(filepath.Join(dir, "b.safetensors")))
	require.Equal(t, []string{"c/x", "c/y", "d/x"}, storetest.Names(t, f), "there is room again")
}

// In a bubble of synctest it is the year 2000: the files are from the future.
func TestAFolderFromTheFutureIsNotScannedForEachList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		putModel(t, filepath.Join(dir, "sub/m.safetensors"), nil, "x")
		f, err := Open(dir, Config{})
		require.NoError(t, err)
		defer f.Close()
		scansOf := func() int64 {
			before := f.scans.Load()
			require.NoError(t, f.rescan(false))
			return f.scans.Load() - before
		}
		require.EqualValues(t, 1, scansOf(), "its time may be the same after another change")
		time.Sleep(clockGrain + 1)
		require.EqualValues(t, 1, scansOf())
		require.EqualValues(t, 0, scansOf())
		putModel(t, filepath.Join(dir, "sub/n.safetensors"), nil, "y")
		require.EqualValues(t, 1, scansOf())
		_, there := f.index.Find("sub/n/y")
		require.True(t, there)
	})
}

func TestAFolderThatCannotBeReadIsNotScannedForEachList(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("other systems have other limits for a path")
	}
	dir := t.TempDir()
	top, long := dir, strings.Repeat("n", 200)
	for len(dir)+1+len(long) < 4096 {
		dir = filepath.Join(dir, long)
	}
	require.NoError(t, os.MkdirAll(dir, 0o755))
	root, err := os.OpenRoot(dir)
	require.NoError(t, err)
	defer root.Close()
	require.NoError(t, root.Mkdir(long, 0o755)) // even a superuser cannot read it by its path
	var log bytes.Buffer
	f, err := Open(top, Config{Log: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	defer f.Close()
	require.Contains(t, log.String(), "folder cannot be read")
	f.scan.since = time.Time{} // as if that were long ago
	for range 2 {
		require.Empty(t, storetest.Names(t, f))
		require.EqualValues(t, 2, f.scans.Load())
	}
	require.NoError(t, root.Remove(long))
	require.Empty(t, storetest.Names(t, f))
	require.EqualValues(t, 3, f.scans.Load())
	require.Equal(t, 1, strings.Count(log.String(), "folder cannot be read"))
}

func TestATensorOfAnUnknownDataTypeHidesNoOther(t *testing.T) {
	dir := t.TempDir()
	header := `{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"s":{"dtype":"F8_E8M0","shape":[1],"data_offsets":[1,2]}}`
	file := append([]byte{byte(len(header)), 0, 0, 0, 0, 0, 0, 0}, header+"ab"...)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "m.safetensors"), file, 0o644))
	var log bytes.Buffer
	f, err := Open(dir, Config{Log: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	defer f.Close()
	require.Equal(t, []string{"m/a"}, storetest.Names(t, f))
	require.Contains(t, log.String(), `first=s`)
	require.Contains(t, log.String(), "F8_E8M0")
}

func TestOfTwoTensorsOfANameTheFirstFilesIsServed(t *testing.T) {
	dir := t.TempDir()
	putModel(t, filepath.Join(dir, "a/b.safetensors"), nil, "c", "c/x")
	putModel(t, filepath.Join(dir, "a/b/c.safetensors"), map[string]string{"k": "v"}, "x")
	var log bytes.Buffer
	f, err := Open(dir, Config{Log: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	defer f.Close()
	require.Equal(t, []string{"a/b/c", "a/b/c/__metadata__", "a/b/c/x"}, storetest.Names(t, f))
	require.Equal(t, []byte("c/x"), storetest.Get(t, f, "a/b/c/x"))
	require.Contains(t, log.String(), "file=a/b/c.safetensors tensors=1")
	require.NoError(t, os.Remove(filepath.Join(dir, "a/b.safetensors")))
	require.Equal(t, []string{"a/b/c/__metadata__", "a/b/c/x"}, storetest.Names(t, f))
	require.Equal(t, []byte("x"), storetest.Get(t, f, "a/b/c/x"))
}

func TestFilesAreNeverWrittenTo(t *testing.T) {
	dir := t.TempDir()
	putModel(t, filepath.Join(dir, "m.safetensors"), nil, "x")
	require.NoError(t, os.Chmod(dir, 0o555))
	defer func() { require.NoError(t, os.Chmod(dir, 0o755)) }()
	f, err := Open(dir, Config{})
	require.NoError(t, err)
	require.Equal(t, []string{"m/x"}, storetest.Names(t, f))
	d := tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{1}}
	_, err = f.Create(t.Context(), "new", d, nil)
	require.ErrorIs(t, err, store.ErrReadOnly)
	_, err = f.Create(t.Context(), "m/x", d, nil)
	require.ErrorIs(t, err, store.ErrExists)
	_, err = f.Delete(t.Context(), "nothing", "m/x")
	require.ErrorIs(t, err, store.ErrPart)
	require.NoError(t, f.Close())
	require.ErrorIs(t, f.Close(), store.ErrClosed)
	_, err = f.Open(t.Context(), "m/x")
	require.ErrorIs(t, err, store.ErrClosed)
	_, err = f.List(t.Context(), "", "", 1)
	require.ErrorIs(t, err, store.ErrClosed)
	entries := testkit.Must(os.ReadDir(dir))
	require.Len(t, entries, 1)

	_, err = Open(filepath.Join(dir, "m.safetensors"), Config{})
	require.ErrorContains(t, err, "not a folder")
	_, err = Open(filepath.Join(dir, "nothing"), Config{})
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = Open(dir, Config{Name: "\x00"})
	require.ErrorIs(t, err, store.ErrName)
}

func TestAStoreBesideFilesPushesAndDeletesOnlyItsOwn(t *testing.T) {
	dir := t.TempDir()
	main := memory.New(testkit.Pool(t), 64<<20)
	storetest.Put(t, main, "m/y", []byte("pushed"))
	storetest.Put(t, main, "own", []byte("o"))
	putModel(t, filepath.Join(dir, "m.safetensors"), nil, "x", "y")
	f, err := Open(dir, Config{})
	require.NoError(t, err)
	s := storetest.Close(t, Beside(main, f))
	require.Equal(t, []string{"m/x", "m/y", "own"}, storetest.Names(t, s))
	require.Equal(t, []byte("x"), storetest.Get(t, s, "m/x"))
	require.Equal(t, []byte("pushed"), storetest.Get(t, s, "m/y"), "what was pushed goes before")

	d := tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{1}}
	_, err = s.Create(t.Context(), "m/x", d, nil)
	require.ErrorIs(t, err, store.ErrExists)
	w, err := s.Create(t.Context(), "m/y", d, nil)
	require.NoError(t, err, "main has it")
	w.Abort()
	deleted, err := s.Delete(t.Context(), "m/y", "nothing", "m/x", "own")
	require.ErrorIs(t, err, store.ErrPart)
	require.Equal(t, []string{"m/y"}, deleted, "those before the one that cannot be")
	require.Equal(t, []byte("y"), storetest.Get(t, s, "m/y"))
	require.Equal(t, []string{"m/x", "m/y", "own"}, storetest.Names(t, s))
	infos, err := s.List(t.Context(), "m/*", "m/x", 1)
	require.NoError(t, err)
	require.Len(t, infos, 1)
	require.Equal(t, "m/y", infos[0].Name)
	_, isMeter := s.(store.Meter)
	require.True(t, isMeter)
	require.Same(t, main, Beside(main))
}
