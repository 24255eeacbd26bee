package folder

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/fault"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/files"
	"github.com/tensorferry/tensorferry/store/storetest"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// logged is a log to look at.
type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logged) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// count returns how many lines hold all of words.
func (l *logged) count(words ...string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.text.String()) {
		if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) }) {
			n++
		}
	}
	return n
}

func filesIn(t testing.TB, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range entries {
		if e.Name() != lockFile {
			names = append(names, e.Name())
		}
	}
	return names
}

func openFolder(t testing.TB, dir string, config Config) *Store {
	t.Helper()
	f, err := Open(dir, config)
	require.NoError(t, err)
	return f
}

func openWithFiles(t testing.TB, dir string, config Config) store.Store {
	t.Helper()
	s, err := OpenWithFiles(dir, config)
	require.NoError(t, err)
	return storetest.Close(t, s)
}

// place puts a file into the folder.
func place(t testing.TB, dir, name string, data []byte) {
	t.Helper()
	storetest.Place(t, filepath.Join(dir, name), data)
}

// model is a .safetensors file of vectors.
func model(t testing.TB, tensors map[string]string) []byte {
	t.Helper()
	return storetest.Model(t, nil, tensors)
}

// quickDisk does not wait for the disk.
func quickDisk() disk {
	d := systemDisk
	d.sync = func(*os.File) error { return nil }
	d.syncNames = func(string) error { return nil }
	return d
}

func TestAFolderIsAStore(t *testing.T) {
	storetest.Run(t, func(t testing.TB) store.Store {
		f := openFolder(t, t.TempDir(), Config{})
		f.disk = quickDisk()
		return f
	})
}

func TestAFolderWithFilesOfOthersIsAStore(t *testing.T) {
	storetest.Run(t, func(t testing.TB) store.Store {
		dir := t.TempDir()
		f := openFolder(t, dir, Config{})
		f.disk = quickDisk()
		return files.Beside(f, testkit.Must(files.Open(dir, files.Config{Flat: true, Skip: isPushedName})))
	})
}

func TestAFolderKnowsItsTensorsAfterARestart(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "not", "there yet")
	f := openFolder(t, dir, Config{})
	d := tensor.Desc{DType: tensor.Complex128, Shape: tensor.Shape{2, 3}}
	data := testkit.Bytes(96, 1)
	storetest.Push(t, f, "ø/%2F/…", d, data, 50, nil)
	storetest.Put(t, f, "x", testkit.Bytes(100_000, 1))
	storetest.Put(t, f, "x", testkit.Bytes(100_000, 2))
	storetest.Put(t, f, "deleted", nil)
	storetest.Remove(t, f, "deleted")
	w, err := f.Create(t.Context(), "z", storetest.Vector(0), map[string]string{"unit": "100 %"})
	require.NoError(t, err)
	testkit.Must(w.Commit(t.Context()))
	before := testkit.Must(f.List(t.Context(), "", "", 10))
	used, _ := f.Used()
	require.NoError(t, f.Close())

	f = storetest.Close(t, openFolder(t, dir, Config{}))
	require.Len(t, before, 3)
	require.Empty(t, cmp.Diff(before, testkit.Must(f.List(t.Context(), "", "", 10))))
	require.Equal(t, data, storetest.Get(t, f, "ø/%2F/…"))
	require.Equal(t, testkit.Bytes(100_000, 2), storetest.Get(t, f, "x"))
	again, _ := f.Used()
	require.Equal(t, used, again)
	storetest.Put(t, f, "x", []byte{3})
	require.Equal(t, []byte{3}, storetest.Get(t, f, "x"))
	require.Len(t, filesIn(t, dir), 3)
}

func TestTheMetadataOfAFolderHasALimit(t *testing.T) {
	dir := t.TempDir()
	f := openFolder(t, dir, Config{})
	said := map[string]string{"k": strings.Repeat("v", 1000)}
	w, err := f.Create(t.Context(), "x", storetest.Vector(0), said)
	require.NoError(t, err)
	testkit.Must(w.Commit(t.Context()))
	require.NoError(t, f.Close())

	f = storetest.Close(t, openFolder(t, dir, Config{}))
	require.EqualValues(t, 1001, f.metadata.Load())
	f.metadata.Add(allMetadata - 2001)
	_, err = f.Create(t.Context(), "y", storetest.Vector(0), said)
	require.ErrorIs(t, err, store.ErrFull)
	require.ErrorContains(t, err, "the metadata of all tensors would be longer than 67108864 bytes")
	storetest.Put(t, f, "y", nil)
	storetest.Remove(t, f, "x")
	w, err = f.Create(t.Context(), "y", storetest.Vector(0), said)
	require.NoError(t, err)
	w.Abort()
	require.EqualValues(t, allMetadata-2001, f.metadata.Load())
}

func TestAPushedFileIsOneThatOtherProgramsRead(t *testing.T) {
	wide := slices.Repeat(tensor.Shape{1}, tensor.MaxRank)
	wide[5] = 3
	for name, tc := range map[string]struct{ pushed, file tensor.Desc }{
		"float32":                     {tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{2, 3}}, tensor.Desc{DType: tensor.Float32, Shape: tensor.Shape{2, 3}}},
		"complex128":                  {tensor.Desc{DType: tensor.Complex128, Shape: tensor.Shape{2, 3}}, tensor.Desc{DType: tensor.Float64, Shape: tensor.Shape{2, 3, 2}}},
		"complex128, a scalar":        {tensor.Desc{DType: tensor.Complex128}, tensor.Desc{DType: tensor.Float64, Shape: tensor.Shape{2}}},
		"complex128, no axis is left": {tensor.Desc{DType: tensor.Complex128, Shape: wide}, tensor.Desc{DType: tensor.Float64, Shape: tensor.Shape{6}}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			f := storetest.Close(t, openFolder(t, dir, Config{}))
			size, err := tc.pushed.Bytes()
			require.NoError(t, err)
			data := testkit.Bytes(int(size), 1)
			info := storetest.Push(t, f, "the 100% name", tc.pushed, data, int(size), nil)
			names := filesIn(t, dir)
			require.Len(t, names, 1)
			st, err := tensorfile.OpenSafetensors(filepath.Join(dir, names[0]))
			require.NoError(t, err)
			defer st.Close()
			x, err := st.Tensor("tensor")
			require.NoError(t, err)
			require.True(t, tc.file.Equal(x.Desc), "%v", x.Desc)
			require.Equal(t, data, x.Data)
			meta := st.Metadata()
			require.Equal(t, "the 100%25 name", meta["tensorferry.name"])
			require.Equal(t, tc.pushed.DType.String(), meta["tensorferry.dtype"])
			require.Equal(t, info.Digest.String(), meta["tensorferry.digest"])
			require.Equal(t, info.Stored.Format("2006-01-02T15:04:05.000000000Z"), meta["tensorferry.stored"])
		})
	}
}

// TestWhatACrashLeavesDoesNoHarm puts into a folder what a process that ends at
// any point of a push may leave, and what a bad disk may make of it.
func TestWhatACrashLeavesDoesNoHarm(t *testing.T) {
	source := t.TempDir()
	f := openFolder(t, source, Config{})
	storetest.Put(t, f, "x", testkit.Bytes(1000, 1))
	require.NoError(t, f.Close())
	name := fileName("x")
	whole, err := os.ReadFile(filepath.Join(source, name))
	require.NoError(t, err)
	header := len(whole) - 1000
	edit := func(old, changed string) []byte {
		require.Len(t, changed, len(old))
		require.Contains(t, string(whole), old)
		return bytes.Replace(whole, []byte(old), []byte(changed), 1)
	}
	type file struct {
		name string
		data []byte
	}
	cases := map[string]file{
		"no header yet":         {".push-A.tmp", append(make([]byte, header), whole[header:]...)},
		"an empty temp":         {".push-A.tmp", nil},
		"half a temp":           {".push-A.tmp", whole[:len(whole)/2]},
		"a whole temp":          {".push-A.tmp", whole},
		"another program's":     {name, model(t, map[string]string{"x": "\x05"})},
		"no digest":             {name, edit("xxh3:", "-----")},
		"no time":               {name, edit("tensorferry.stored\":\"2", "tensorferry.stored\":\"x")},
		"no data type":          {name, edit("uint8", "uint9")},
		"another data type":     {name, edit("\"uint8\"", "\"int16\"")},
		"no shape":              {name, edit("shape\":\"1000\"", "shape\":\"1,,0\"")},
		"the name of another":   {name, edit("name\":\"x\"", "name\":\"y\"")},
		"no escape":             {name, edit("name\":\"x\"", "name\":\"%\"")},
		"one byte too many":     {name, append(slices.Clone(whole), 0)},
		"a header of zeros":     {name, append(make([]byte, header), whole[header:]...)},
		"a length out of reach": {name, binary.LittleEndian.AppendUint64(nil, 1<<63)},
	}
	for _, n := range []int{0, 1, 7, 8, 9, header - 1, header, header + 1, len(whole) - 1} {
		cases[fmt.Sprintf("cut to %d bytes", n)] = file{name, whole[:n]}
	}
	for what, left := range cases {
		t.Run(what, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, left.name)
			require.NoError(t, os.WriteFile(path, left.data, 0o644))
			var log logged
			f := storetest.Close(t, openFolder(t, dir, Config{Log: log.logger()}))
			require.Empty(t, storetest.Names(t, f))
			require.Empty(t, storetest.Names(t, f))
			_, err := f.Open(t.Context(), "x")
			require.ErrorIs(t, err, store.ErrNotFound)
			used, _ := f.Used()
			require.Zero(t, used)
			if left.name == name {
				require.FileExists(t, path, "nothing is deleted that may be of use")
				require.Equal(t, 1, log.count("cannot be used", name))
			} else {
				require.NoFileExists(t, path)
				require.Zero(t, log.count(""))
			}
			storetest.Put(t, f, "x", []byte("again"))
			require.Equal(t, []byte("again"), storetest.Get(t, f, "x"))
			require.NoError(t, f.Close())
			f = storetest.Close(t, openFolder(t, dir, Config{}))
			require.Equal(t, []byte("again"), storetest.Get(t, f, "x"))
			require.Len(t, filesIn(t, dir), 1)
		})
	}
}

func TestAFolderBelongsToOneStore(t *testing.T) {
	dir := t.TempDir()
	f := openFolder(t, dir, Config{})
	w, err := f.Create(t.Context(), "x", storetest.Vector(1), nil)
	require.NoError(t, err)
	_, err = Open(dir, Config{})
	require.ErrorIs(t, err, store.ErrLocked)
	require.ErrorContains(t, err, dir)
	require.NoError(t, w.WriteViews(t.Context(), 0, [][]byte{{1}}), "its temporary file is left alone")
	_, err = w.Commit(t.Context())
	require.NoError(t, err)
	require.NoError(t, f.Close())
	f = openFolder(t, dir, Config{})
	require.Equal(t, []string{"x"}, storetest.Names(t, f))
	require.NoError(t, f.Close())
}

func TestAFolderThatIsNotTheOneLockedIsLeftAlone(t *testing.T) {
	for name, replace := range map[string]func(t *testing.T, dir string){
		"removed":          func(t *testing.T, dir string) { require.NoError(t, os.RemoveAll(dir)) },
		"moved":            func(t *testing.T, dir string) { require.NoError(t, os.Rename(dir, dir+".old")) },
		"without its lock": func(t *testing.T, dir string) { require.NoError(t, os.Remove(filepath.Join(dir, lockFile))) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "store")
			first := storetest.Close(t, openFolder(t, dir, Config{}))
			storetest.Put(t, first, "x", []byte{1})
			reader, err := first.Open(t.Context(), "x")
			require.NoError(t, err)
			defer reader.Release()
			w, err := first.Create(t.Context(), "y", storetest.Vector(1), nil)
			require.NoError(t, err)
			require.NoError(t, w.WriteViews(t.Context(), 0, [][]byte{{1}}))

			replace(t, dir)
			second := storetest.Close(t, openFolder(t, dir, Config{}))
			storetest.Put(t, second, "x", []byte{2})
			has := storetest.Names(t, second)

			_, err = w.Commit(t.Context())
			require.ErrorIs(t, err, store.ErrUnavailable)
			require.ErrorContains(t, err, dir)
			_, err = first.Create(t.Context(), "z", storetest.Vector(1), nil)
			require.ErrorIs(t, err, store.ErrUnavailable)
			_, err = first.Delete(t.Context(), "x")
			require.ErrorIs(t, err, store.ErrUnavailable)
			_, err = first.Open(t.Context(), "x")
			require.ErrorIs(t, err, store.ErrUnavailable)
			_, err = first.List(t.Context(), "", "", 1)
			require.ErrorIs(t, err, store.ErrUnavailable)
			require.Equal(t, []byte{1}, testkit.Must(storetest.Read(t.Context(), reader, 1)), "what was opened is read to the end")

			require.Equal(t, has, storetest.Names(t, second))
			require.Equal(t, []byte{2}, storetest.Get(t, second, "x"))
		})
	}
}

func TestAFolderThatCannotBeSaysWhy(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o644))
	_, err := Open(file, Config{})
	require.ErrorContains(t, err, file)
	_, err = Open(t.TempDir(), Config{Limit: -1})
	require.ErrorContains(t, err, "-1 bytes")
	_, err = Open(t.TempDir(), Config{MaxTensors: -1})
	require.ErrorContains(t, err, "-1 tensors")
}

func TestAFolderKeepsItsLimits(t *testing.T) {
	dir := t.TempDir()
	f := openFolder(t, dir, Config{Limit: 10_000})
	storetest.Put(t, f, "a", make([]byte, 4000))
	w, err := f.Create(t.Context(), "b", storetest.Vector(4000), nil)
	require.NoError(t, err)
	for _, n := range []int64{4000, 10_000, 1 << 40} {
		_, err = f.Create(t.Context(), "c", storetest.Vector(n), nil)
		require.ErrorIs(t, err, store.ErrFull)
		require.ErrorContains(t, err, "of the limit of 10000 are free")
	}
	require.Len(t, filesIn(t, dir), 2, "what was refused left a file")
	w.Abort()
	require.NoError(t, f.Close())

	f = openFolder(t, dir, Config{Limit: 10_000})
	_, err = f.Create(t.Context(), "b", storetest.Vector(6000), nil)
	require.ErrorIs(t, err, store.ErrFull, "what was there before counts")
	storetest.Put(t, f, "b", make([]byte, 4000))
	storetest.Remove(t, f, "a")
	storetest.Put(t, f, "c", make([]byte, 4000))
	require.NoError(t, f.Close())

	f = storetest.Close(t, openFolder(t, dir, Config{MaxTensors: 3}))
	w, err = f.Create(t.Context(), "d", storetest.Vector(0), nil)
	require.NoError(t, err)
	_, err = f.Create(t.Context(), "e", storetest.Vector(0), nil)
	require.ErrorIs(t, err, store.ErrFull)
	storetest.Put(t, f, "b", nil) // which there is
	w.Abort()
	storetest.Put(t, f, "e", nil)
	require.Equal(t, []string{"b", "c", "e"}, storetest.Names(t, f))
}

func TestAFullDiskIsMetBeforeTheFirstByte(t *testing.T) {
	dir := t.TempDir()
	f := storetest.Close(t, openFolder(t, dir, Config{}))
	w, err := f.Create(t.Context(), "x", storetest.Vector(1<<40), nil)
	if err == nil {
		w.Abort()
		t.Skip("this disk takes a file of 1 TiB, or does not promise")
	}
	require.ErrorIs(t, err, store.ErrFull)
	require.ErrorContains(t, err, "1099511")
	require.Empty(t, filesIn(t, dir))
	used, _ := f.Used()
	require.Zero(t, used)
}

func TestAFolderThatCannotBeWrittenSaysSo(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("root may write everywhere")
	}
	dir := t.TempDir()
	f, err := Open(dir, Config{})
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, os.Chmod(dir, 0o555))
	defer func() { require.NoError(t, os.Chmod(dir, 0o755)) }()
	_, err = f.Create(t.Context(), "x", tensor.Desc{DType: tensor.Int8}, nil)
	require.ErrorIs(t, err, store.ErrUnwritable)
}

func TestADiskThatFillsUpIsFull(t *testing.T) {
	w := &writer{header: 8, size: 2, pushed: &pushed{info: store.Info{Name: "x"}}}
	for _, cause := range []error{syscall.ENOSPC, syscall.EDQUOT, &os.PathError{Op: "write", Path: "x", Err: syscall.ENOSPC}} {
		require.ErrorIs(t, w.wrap("write", cause), store.ErrFull)
	}
	for _, cause := range []error{syscall.EIO, syscall.EROFS, syscall.EACCES, &os.PathError{Op: "open", Path: "x", Err: syscall.EPERM}} {
		require.ErrorIs(t, w.wrap("reserve space for", cause), store.ErrUnwritable)
	}
	require.NotErrorIs(t, w.wrap("reserve space for", syscall.EMFILE), store.ErrUnwritable)
	require.NotErrorIs(t, w.wrap("write", syscall.EIO), store.ErrFull)
	require.ErrorIs(t, w.wrap("write", syscall.EIO), syscall.EIO)
}

func TestAWholeFileAppearsAsItsTensors(t *testing.T) {
	dir := t.TempDir()
	place(t, dir, "model.safetensors", model(t, map[string]string{"w/0": "\x01\x02", "b": "\x03"}))
	elsewhere := filepath.Join(t.TempDir(), "blob")
	require.NoError(t, os.WriteFile(elsewhere, model(t, map[string]string{"x": "\x04"}), 0o644))
	require.NoError(t, os.Symlink(elsewhere, filepath.Join(dir, "linked.safetensors")))
	place(t, dir, "odd.safetensors", model(t, map[string]string{"x": "\x06", "a\nb": "\x07", strings.Repeat("n", store.MaxName): "\x08"}))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "folder.safetensors"), 0o755))
	place(t, dir, ".hidden.safetensors", model(t, map[string]string{"x": "\x05"}))
	place(t, dir, "notes.txt", []byte("text"))
	place(t, dir, "broken.safetensors", []byte("text"))

	var log logged
	f := openWithFiles(t, dir, Config{Log: log.logger()})
	require.ElementsMatch(t, []string{"model/w/0", "model/b", "linked/x", "odd/x"}, storetest.Names(t, f))
	require.Equal(t, 1, log.count("broken.safetensors"))
	require.Equal(t, 1, log.count("odd.safetensors", "tensors=2"))
	require.Equal(t, 1, log.count("served read-only", "files=4"))
	require.Equal(t, 3, log.count(""))
	for name, want := range map[string][]byte{
		"model/w/0": {1, 2}, "model/b": {3}, "linked/x": {4},
	} {
		require.Equal(t, want, storetest.Get(t, f, name))
	}
	stat, err := os.Stat(filepath.Join(dir, "model.safetensors"))
	require.NoError(t, err)
	require.Equal(t, store.Info{
		Name: "model/w/0", Desc: storetest.Vector(2),
		Stored: stat.ModTime(), Durable: true, File: "model.safetensors",
	}, testkit.Must(f.List(t.Context(), "model/*/*", "", 9))[0])
	_, err = f.Delete(t.Context(), "model/b")
	require.ErrorIs(t, err, store.ErrPart)
	_, err = f.Create(t.Context(), "model/b", storetest.Vector(1), nil)
	require.ErrorIs(t, err, store.ErrExists)
	used, _ := f.(store.Meter).Used()
	require.Zero(t, used)
}

func TestFilesMayComeChangeAndGo(t *testing.T) {
	dir := t.TempDir()
	var log logged
	f := openWithFiles(t, dir, Config{Log: log.logger()})
	require.Empty(t, storetest.Names(t, f))

	place(t, dir, "m.safetensors", model(t, map[string]string{"x": "\x01"}))
	require.Equal(t, []byte{1}, storetest.Get(t, f, "m/x"), "an open looks for new files")
	r, err := f.Open(t.Context(), "m/x")
	require.NoError(t, err)
	place(t, dir, "m.safetensors", model(t, map[string]string{"x": "\x02", "y": "\x03"}))
	require.Equal(t, []string{"m/x", "m/y"}, storetest.Names(t, f))
	require.Equal(t, []byte{2}, storetest.Get(t, f, "m/x"))
	require.Equal(t, []byte{1}, testkit.Must(storetest.Read(t.Context(), r, 100)), "a reader keeps the file it opened")

	require.NoError(t, os.Remove(filepath.Join(dir, "m.safetensors")))
	require.Empty(t, storetest.Names(t, f))
	_, err = f.Open(t.Context(), "m/x")
	require.ErrorIs(t, err, store.ErrNotFound)
	require.Equal(t, []byte{1}, testkit.Must(storetest.Read(t.Context(), r, 100)))
	r.Release()
	require.Zero(t, log.count(""))
}

func TestANameLeadsToTheFileThatIsThereNow(t *testing.T) {
	dir := t.TempDir()
	var log logged
	f := openWithFiles(t, dir, Config{Log: log.logger()})
	path := filepath.Join(dir, "m.safetensors")
	place(t, dir, "m.safetensors", model(t, map[string]string{"x": "\x01"}))
	require.Equal(t, []byte{1}, storetest.Get(t, f, "m/x"))
	for i := byte(2); i < 5; i++ { // nobody lists meanwhile
		place(t, dir, "m.safetensors", model(t, map[string]string{"x": string(rune(i))}))
		require.Equal(t, []byte{i}, storetest.Get(t, f, "m/x"), "another file in its place")
	}
	// Written to in place, which the folder's own time does not show.
	require.NoError(t, os.WriteFile(path, model(t, map[string]string{"x": "\x05"}), 0o644))
	require.NoError(t, os.Chtimes(path, time.Time{}, time.Now().Add(time.Minute)))
	require.Equal(t, []byte{5}, storetest.Get(t, f, "m/x"))

	require.NoError(t, os.Remove(path))
	_, err := f.Open(t.Context(), "m/x")
	require.ErrorIs(t, err, store.ErrNotFound)
	place(t, dir, "m.safetensors", model(t, map[string]string{"x": "\x06"}))
	require.Equal(t, []string{"m/x"}, storetest.Names(t, f))
	require.NoError(t, os.Remove(path))
	storetest.Put(t, f, "m/x", []byte{7}) // the name is free again
	require.Zero(t, log.count(""))
}

func TestAPushedTensorHidesOneOfAFile(t *testing.T) {
	dir := t.TempDir()
	f := openWithFiles(t, dir, Config{})
	storetest.Put(t, f, "m/x", []byte("pushed"))
	place(t, dir, "m.safetensors", model(t, map[string]string{"x": "\x01", "y": "\x02"}))
	require.Equal(t, []string{"m/x", "m/y"}, storetest.Names(t, f))
	require.Equal(t, []byte("pushed"), storetest.Get(t, f, "m/x"))
	storetest.Put(t, f, "m/x", []byte("again"))
	require.Equal(t, []byte("again"), storetest.Get(t, f, "m/x"))
	storetest.Remove(t, f, "m/x")
	require.Equal(t, []byte{1}, storetest.Get(t, f, "m/x"))
	_, err := f.Delete(t.Context(), "m/x")
	require.ErrorIs(t, err, store.ErrPart)
}

func TestAFolderFindsWhatOthersDoToPushedFiles(t *testing.T) {
	dir := t.TempDir()
	var log logged
	f := storetest.Close(t, openFolder(t, dir, Config{Log: log.logger()}))
	storetest.Put(t, f, "deleted", []byte{1})
	storetest.Put(t, f, "changed", []byte{2})
	storetest.Put(t, f, "kept", []byte{3})
	kept, err := os.ReadFile(filepath.Join(dir, fileName("kept")))
	require.NoError(t, err)

	require.NoError(t, os.Remove(filepath.Join(dir, fileName("deleted"))))
	_, err = f.Open(t.Context(), "deleted")
	require.ErrorIs(t, err, store.ErrNotFound)
	require.Equal(t, 1, log.count("deleted by another program"))
	place(t, dir, fileName("changed"), model(t, map[string]string{"tensor": "\x01\x02"}))
	_, err = f.Open(t.Context(), "changed")
	require.ErrorContains(t, err, "its file has changed")
	storetest.Remove(t, f, "changed")
	storetest.Remove(t, f, "kept")
	place(t, dir, fileName("kept"), kept) // from a backup
	require.Empty(t, storetest.Names(t, f), "it is found at the next start")
	require.NoError(t, f.Close())
	f = storetest.Close(t, openFolder(t, dir, Config{}))
	require.Equal(t, []byte{3}, storetest.Get(t, f, "kept"))
	require.Equal(t, []string{"kept"}, storetest.Names(t, f))
}

func TestADeletionIsAsDurableAsAPushHoweverManyItIs(t *testing.T) {
	dir := t.TempDir()
	place(t, dir, "m.safetensors", model(t, map[string]string{"x": "\x01"}))
	folder := openFolder(t, dir, Config{})
	f := storetest.Close(t, files.Beside(folder, testkit.Must(files.Open(dir, files.Config{Skip: isPushedName}))))
	for _, name := range []string{"a", "b", "c", "d"} {
		storetest.Put(t, f, name, []byte(name))
	}
	require.Len(t, storetest.Names(t, f), 5)
	syncs, left := 0, 0
	failed := errors.New("the disk is on fire")
	var fails error
	folder.syncNames = func(dir string) error {
		syncs++
		left = len(filesIn(t, dir))
		return fails
	}
	storetest.Remove(t, f, "a", "b")
	require.Equal(t, 1, syncs)
	require.Equal(t, 3, left, "files at that time")
	deleted, err := f.Delete(t.Context(), "a", "nothing")
	require.NoError(t, err)
	require.Empty(t, deleted)
	require.Equal(t, 1, syncs, "nothing was to be made durable")
	deleted, err = f.Delete(t.Context(), "c", "m/x", "d")
	require.ErrorIs(t, err, store.ErrPart)
	require.Equal(t, []string{"c"}, deleted)
	require.Equal(t, 2, syncs, "an error is no reason to forget what was deleted before")
	fails = failed
	deleted, err = f.Delete(t.Context(), "d")
	require.ErrorIs(t, err, failed)
	require.Equal(t, []string{"d"}, deleted)
	require.Equal(t, []string{"m/x"}, storetest.Names(t, f))
}

func TestNothingStaysMapped(t *testing.T) {
	if _, err := os.Stat("/proc/self/maps"); err != nil {
		t.Skip("this system does not list its maps")
	}
	dir := t.TempDir()
	maps := func() int {
		text, err := os.ReadFile("/proc/self/maps")
		require.NoError(t, err)
		return strings.Count(string(text), dir)
	}
	f := openWithFiles(t, dir, Config{})
	storetest.Put(t, f, "x", make([]byte, 100))
	require.Zero(t, maps(), "a pushed tensor that nobody reads")
	a, err := f.Open(t.Context(), "x")
	require.NoError(t, err)
	b, err := f.Open(t.Context(), "x")
	require.NoError(t, err)
	require.Equal(t, 1, maps())
	_, held, err := a.View(t.Context(), 0, 1)
	require.NoError(t, err)
	a.Release()
	require.Equal(t, 1, maps())
	b.Release()
	require.Zero(t, maps(), "views are copies")
	held.Release()
	storetest.Get(t, f, "x")
	place(t, dir, "m.safetensors", model(t, map[string]string{"x": "\x01"}))
	r, err := f.Open(t.Context(), "m/x")
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.Equal(t, 1, maps())
	r.Release()
	require.Zero(t, maps())
}

// TestATensorWhoseNameIsRefusedNowIsStillThere: an older program may have stored it.
func TestATensorWhoseNameIsRefusedNowIsStillThere(t *testing.T) {
	names := []string{"__metadata__", "m/", "x\ufffd"}
	dir := t.TempDir()
	for i, name := range names {
		var d codec.Digester
		_, _ = d.Write([]byte{byte(i)}) // it never fails
		header, err := pushedHeader(store.Info{Name: name, Desc: storetest.Vector(1), Digest: d.Sum(), Stored: time.Now()})
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(dir, fileName(name)), append(header, byte(i)), 0o644))
	}
	s := openWithFiles(t, dir, Config{})
	require.Equal(t, names, storetest.Names(t, s))
	for i, name := range names {
		require.Equal(t, []byte{byte(i)}, storetest.Get(t, s, name))
		_, err := s.Create(t.Context(), name, storetest.Vector(1), nil)
		require.ErrorIs(t, err, store.ErrName)
	}
	storetest.Remove(t, s, names...)
	require.Empty(t, filesIn(t, dir))
}

// FuzzNames holds names to be texts: whatever they look like, they come back, and
// nothing is touched outside the folder or under another name.
func FuzzNames(f *testing.F) {
	for _, name := range []string{
		"x", "../../etc/passwd", "/etc/passwd", "..", ".", ".lock", ".push-A.tmp", "a/b", "a\\b", "C:\\x", "con", "ø/尺寸/😀",
		"\ufffd", "%EF%BF%BD", "%", "__metadata__", "a/__metadata__", "a/", "tensor", "\"", "*", "a\u202eb", "\u2028", "", "\xff", "a\x00", strings.Repeat("é", 256), strings.Repeat("n", 513),
	} {
		f.Add(name)
	}
	outside := f.TempDir()
	dir := filepath.Join(outside, "folder")
	s := storetest.Close(f, openFolder(f, dir, Config{}))
	data := []byte("content")
	f.Fuzz(func(t *testing.T, name string) {
		if store.CheckNew(name) != nil {
			_, err := s.Create(t.Context(), name, storetest.Vector(7), nil)
			require.ErrorIs(t, err, store.ErrName)
			require.Empty(t, filesIn(t, dir))
			return
		}
		storetest.Put(t, s, name, data)
		require.Equal(t, []string{name}, storetest.Names(t, s))
		require.Equal(t, data, storetest.Get(t, s, name))
		require.Equal(t, []string{fileName(name)}, filesIn(t, dir))
		require.Equal(t, []string{"folder"}, filesIn(t, outside))
		st, err := tensorfile.OpenSafetensors(filepath.Join(dir, fileName(name)))
		require.NoError(t, err)
		info, err := pushedInfo(fileName(name), st)
		require.NoError(t, err)
		require.Equal(t, name, info.Name)
		require.NoError(t, st.Close())
		storetest.Remove(t, s, name)
		require.Empty(t, filesIn(t, dir))
	})
}

func TestAShortenedFileIsAnErrorAndWhatWasViewedStays(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("files are read here, not mapped")
	}
	dir := t.TempDir()
	f := storetest.Close(t, openFolder(t, dir, Config{}))
	want := bytes.Repeat([]byte{7}, 1*mib)
	storetest.Put(t, f, "x", want)
	r, err := f.Open(t.Context(), "x")
	require.NoError(t, err)
	defer r.Release()
	data, held, err := r.View(t.Context(), 0, 1*mib)
	require.NoError(t, err)
	defer held.Release()
	require.NoError(t, os.Truncate(filepath.Join(dir, fileName("x")), 4096))
	require.Equal(t, want, data)
	_, _, err = r.View(t.Context(), mib/2, mib/2)
	require.ErrorIs(t, err, fault.ErrVanished)
}

func TestTheDigestOfAFilesTensorIsRememberedUntilTheFileChanges(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "m.safetensors")
	place(t, dir, "m.safetensors", model(t, map[string]string{"x": "\x01\x02"}))
	f := openWithFiles(t, dir, Config{})
	digest := func() codec.Digest {
		r, err := f.Open(t.Context(), "m/x")
		require.NoError(t, err)
		defer r.Release()
		return r.Info().Digest
	}
	require.True(t, digest().IsZero())
	r, err := f.Open(t.Context(), "m/x")
	require.NoError(t, err)
	r.(store.DigestKeeper).Digested(codec.Digest{1})
	r.Release()
	require.Equal(t, codec.Digest{1}, digest())
	place(t, dir, "other.safetensors", model(t, map[string]string{"y": "\x01"}))
	_, err = f.Open(t.Context(), "other/y") // has the folder looked at
	require.NoError(t, err)
	require.Equal(t, codec.Digest{1}, digest(), "another file is none of its business")
	list, err := f.List(t.Context(), "m/*", "", 10)
	require.NoError(t, err)
	require.Equal(t, codec.Digest{1}, list[0].Digest)

	later := time.Now().Add(time.Hour)
	require.NoError(t, os.Chtimes(path, later, later)) // written to in place
	require.True(t, digest().IsZero())
}
