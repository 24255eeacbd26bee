package folder

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/shelf"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/storetest"
)

var errFault = errors.New("the disk is on fire")

// hasSet reports whether all tensors of the set are there, or none is.
func hasSet(t testing.TB, f *Store) bool {
	t.Helper()
	texts := map[string]string{}
	for _, name := range storetest.Names(t, f) {
		texts[name] = string(storetest.Get(t, f, name))
	}
	if texts["b"] == "" {
		require.Equal(t, map[string]string{"a": "old", "c": "old"}, texts)
		return false
	}
	require.Equal(t, map[string]string{"a": "new", "b": "new", "c": "new"}, texts)
	return true
}

// TestAFaultAtAnyStepOfASetLeavesAllOrNothing has one step fail, or all from one on. It
// also opens what a process that is killed at that step leaves.
func TestAFaultAtAnyStepOfASetLeavesAllOrNothing(t *testing.T) {
	const steps = 7 // sync, the manifest's name, sync, three names, sync
	for step := range steps {
		for _, once := range []bool{true, false} {
			t.Run(fmt.Sprintf("step=%d/once=%t", step, once), func(t *testing.T) {
				dir, killed := t.TempDir(), filepath.Join(t.TempDir(), "killed")
				f := storetest.Close(t, openFolder(t, dir, Config{}))
				storetest.Put(t, f, "a", []byte("old"))
				storetest.Put(t, f, "c", []byte("old"))
				set := storetest.Begin(t, f, []byte("new"), "a", "b", "c")
				require.NoError(t, errorOf(f.Ready(t.Context(), set[1])))
				n := -1
				fault := func() error {
					if n++; n == step {
						require.NoError(t, os.CopyFS(killed, os.DirFS(dir)))
					}
					if n == step || n > step && !once {
						return errFault
					}
					return nil
				}
				f.syncNames = func(dir string) error {
					if err := fault(); err != nil {
						return err
					}
					return syncFolder(dir)
				}
				f.rename = func(from, to string) error {
					if err := fault(); err != nil {
						return err
					}
					return os.Rename(from, to)
				}
				infos, err := f.CommitAll(t.Context(), set)
				all := hasSet(t, f)
				require.Equal(t, step >= 2, all)
				require.Equal(t, all, len(infos) == 3)
				require.Equal(t, step < 3, err != nil, "%v", err)
				require.Less(t, n, steps)
				crashed := storetest.Close(t, openFolder(t, killed, Config{}))
				require.Equal(t, all, hasSet(t, crashed))
				require.NoError(t, crashed.Close())
				w := storetest.Begin(t, f, []byte("again"), "a")[0]
				_, err = w.Commit(t.Context())
				deleted, err2 := f.Delete(t.Context(), "c")
				if once {
					require.NoError(t, err)
					require.NoError(t, err2)
					require.Equal(t, []string{"c"}, deleted)
				} else {
					require.Error(t, err)
					require.Error(t, err2)
				}
				if !once && !all { // the deletion may have succeeded, but for its fsync
					return
				}
				require.NoError(t, f.Close())
				f = storetest.Close(t, openFolder(t, dir, Config{}))
				if !once {
					require.Equal(t, all, hasSet(t, f))
				} else {
					require.Equal(t, "again", string(storetest.Get(t, f, "a")), "a set does not replace what came later")
					require.NotContains(t, storetest.Names(t, f), "c")
				}
				for _, name := range filesIn(t, dir) {
					require.True(t, isPushedName(name), "%s is left", name)
				}
			})
		}
	}
}

// failing returns a disk of which each operation fails if fault says so. A write has then
// written half.
func failing(d disk, fault func(what string) error) disk {
	return disk{
		create: func(path string) (*os.File, error) {
			if err := fault("create"); err != nil {
				return nil, &os.PathError{Op: "open", Path: path, Err: err}
			}
			return d.create(path)
		},
		allocate: func(f *os.File, n int64) error {
			return unless(fault("allocate"), func() error { return d.allocate(f, n) })
		},
		write: func(f *os.File, off int64, views [][]byte) error {
			if err := fault("write"); err != nil {
				_ = d.write(f, off, [][]byte{views[0][:len(views[0])/2]})
				return &os.PathError{Op: "write", Path: f.Name(), Err: err}
			}
			return d.write(f, off, views)
		},
		sync:      func(f *os.File) error { return unless(fault("sync"), func() error { return d.sync(f) }) },
		syncNames: func(dir string) error { return unless(fault("sync names"), func() error { return d.syncNames(dir) }) },
		rename: func(from, to string) error {
			return unless(fault("rename"), func() error { return d.rename(from, to) })
		},
		remove: func(path string) error { return unless(fault("remove"), func() error { return d.remove(path) }) },
	}
}

// unless does what an error does not prevent.
func unless(err error, do func() error) error {
	if err != nil {
		return err
	}
	return do()
}

// TestADiskThatIsFullAtAnyStepOfASetLeavesAllOrNothing fills the disk at every operation of
// a set in turn, until none is left: for that operation, or until somebody has made room.
func TestADiskThatIsFullAtAnyStepOfASetLeavesAllOrNothing(t *testing.T) {
	for _, once := range []bool{true, false} {
		for step := 0; ; step++ {
			what := ""
			t.Run(fmt.Sprintf("step=%d/once=%t", step, once), func(t *testing.T) { what = fillAt(t, step, once) })
			if what == "" || t.Failed() {
				require.Equal(t, 32, step, "operations of a set") // 7 of each file, 11 of the commit
				break
			}
		}
	}
}

// fillAt returns the operation that met the full disk; empty if none did.
func fillAt(t *testing.T, step int, once bool) (what string) {
	dir := t.TempDir()
	f := storetest.Close(t, openFolder(t, dir, Config{}))
	storetest.Put(t, f, "a", []byte("old"))
	storetest.Put(t, f, "c", []byte("old"))
	old, err := f.Open(t.Context(), "a")
	require.NoError(t, err)
	before, _ := f.Used()

	n, isCommitted := -1, false
	f.disk = failing(quickDisk(), func(next string) error {
		if n++; n == step || n > step && !once {
			if n == step {
				what = next
			}
			return syscall.ENOSPC
		}
		isCommitted = isCommitted || next == "rename" // the manifest's is the first
		return nil
	})
	infos, err := commitSet(t, f)
	all := hasSet(t, f)
	require.Equal(t, isCommitted, all)
	require.Equal(t, all, len(infos) == 3)
	used, _ := f.Used()
	if !all {
		require.ErrorIs(t, err, store.ErrFull, what)
		require.ErrorIs(t, err, syscall.ENOSPC)
		require.Equal(t, before, used)
		for _, name := range filesIn(t, dir) {
			require.True(t, isPushedName(name) || isTemp(name) && !once, "%s is left", name)
		}
	}
	require.Zero(t, f.writers, "what is counted in MaxTensors")

	// A process that ends now leaves the same, and less on disk.
	copied := filepath.Join(t.TempDir(), "copied")
	require.NoError(t, os.CopyFS(copied, os.DirFS(dir)))
	restarted := storetest.Close(t, openFolder(t, copied, Config{}))
	require.Equal(t, all, hasSet(t, restarted))
	for _, name := range filesIn(t, copied) {
		require.True(t, isPushedName(name), "%s is left", name)
	}
	again, _ := restarted.Used()
	if all {
		again += before / 2 // a's older file, which is read
	}
	require.Equal(t, again, used)

	f.disk = quickDisk() // there is room again
	infos, err = commitSet(t, f)
	require.NoError(t, err)
	require.Len(t, infos, 3)
	require.True(t, hasSet(t, f))
	require.Equal(t, "old", string(testkit.Must(storetest.Read(t.Context(), old, 10))))
	old.Release()
	used, _ = f.Used()
	require.NoError(t, f.Close())
	f = storetest.Close(t, openFolder(t, dir, Config{}))
	require.True(t, hasSet(t, f))
	for _, name := range filesIn(t, dir) {
		require.True(t, isPushedName(name), "%s is left", name)
	}
	again, _ = f.Used()
	require.Equal(t, again, used)
	return what
}

// commitSet pushes a set as a server does. After an error nothing is left of its Writers.
func commitSet(t *testing.T, f *Store) ([]store.Info, error) {
	t.Helper()
	var set []store.Writer
	defer func() { shelf.AbortAll(set) }()
	for _, name := range []string{"a", "b", "c"} {
		w, err := f.Create(t.Context(), name, storetest.Vector(3), nil)
		if err != nil {
			return nil, err
		}
		set = append(set, w)
		for i, b := range []byte("new") {
			if err := w.WriteViews(t.Context(), int64(i), [][]byte{{b}}); err != nil {
				return nil, err
			}
		}
		if _, err := f.Ready(t.Context(), w); err != nil {
			return nil, err
		}
	}
	return f.CommitAll(t.Context(), set)
}

func TestASetWhoseFileCannotBeFinishedChangesNothing(t *testing.T) {
	dir := t.TempDir()
	f := storetest.Close(t, openFolder(t, dir, Config{}))
	storetest.Put(t, f, "a", []byte("old"))
	storetest.Put(t, f, "c", []byte("old"))
	set := storetest.Begin(t, f, []byte("new"), "a", "b", "c")
	require.NoError(t, errorOf(f.Ready(t.Context(), set[0])))
	require.NoError(t, set[1].(*writer).file.Close()) // what is written to it fails
	require.ErrorIs(t, errorOf(f.Ready(t.Context(), set[1])), os.ErrClosed)
	_, err := f.CommitAll(t.Context(), set)
	require.ErrorIs(t, err, os.ErrClosed, "a failure is not forgotten")
	require.False(t, hasSet(t, f))

	set = storetest.Begin(t, f, []byte("new"), "a", "b", "c")
	require.NoError(t, os.Mkdir(filepath.Join(dir, manifestFile), 0o755)) // so that it cannot be written
	_, err = f.CommitAll(t.Context(), set)
	require.ErrorContains(t, err, `commit tensor "a"`)
	require.False(t, hasSet(t, f))
	require.Len(t, filesIn(t, dir), 3, "no temporary file is left")
	require.NoError(t, f.Close())
	_, err = Open(dir, Config{})
	require.ErrorContains(t, err, manifestFile)
}

func TestASetWhoseManifestAnotherProgramRemovesIsFinished(t *testing.T) {
	dir := t.TempDir()
	var log logged
	f := storetest.Close(t, openFolder(t, dir, Config{Log: log.logger()}))
	storetest.Put(t, f, "a", []byte("old"))
	storetest.Put(t, f, "c", []byte("old"))
	n := 0
	f.rename = func(from, to string) error {
		if n++; n == 3 { // the manifest's, one file's, and another's
			return errFault
		}
		return os.Rename(from, to)
	}
	_, err := f.CommitAll(t.Context(), storetest.Begin(t, f, []byte("new"), "a", "b", "c"))
	require.NoError(t, err)
	require.Equal(t, 1, log.count("files=2"))
	require.NoError(t, os.Remove(filepath.Join(dir, manifestFile)))
	storetest.Put(t, f, "d", []byte("later"))
	storetest.Remove(t, f, "d")
	require.True(t, hasSet(t, f))
	require.NoError(t, f.Close())
	require.True(t, hasSet(t, storetest.Close(t, openFolder(t, dir, Config{}))))
	require.Len(t, filesIn(t, dir), 3)
}

func TestAManifestIsCheckedBeforeItIsFollowed(t *testing.T) {
	temp, file := ".push-A.tmp", fileName("x")
	text := func(temp, file string) string {
		return string((&manifest{moves: []move{{temp: temp, file: file}}}).text())
	}
	good := text(temp, file)
	_, err := parseManifest([]byte(good))
	require.NoError(t, err)
	for name, bad := range map[string]string{
		"empty":                          "",
		"cut":                            good[:len(good)-1],
		"its first line only":            good[:strings.Index(good, "\n")+1],
		"too long":                       good + "\n",
		"another version":                strings.Replace(good, "set 1", "set 2", 1),
		"another temporary file":         strings.Replace(good, "-A.", "-B.", 1),
		"a file that is a user's":        text("m.safetensors", file),
		"a temp outside the folder":      text(".push-/../../A.tmp", file),
		"a name that is a user's":        text(temp, "m.safetensors"),
		"a name outside the folder":      text(temp, "../"+file),
		"more files than a set may have": string((&manifest{moves: make([]move, store.MaxSet+1)}).text()),
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			files := []string{manifestFile, temp, file, "m.safetensors"}
			for _, file := range files {
				require.NoError(t, os.WriteFile(filepath.Join(dir, file), []byte(bad), 0o644))
			}
			_, err := Open(dir, Config{})
			require.ErrorContains(t, err, "is damaged")
			require.Len(t, filesIn(t, dir), len(files), "nothing is deleted or renamed")
		})
	}
}

// FuzzManifest holds what is followed to be exactly what is written.
func FuzzManifest(f *testing.F) {
	m := &manifest{moves: []move{{temp: newTemp(), file: fileName("a")}, {temp: newTemp(), file: fileName("b")}}}
	f.Add(m.text())
	f.Add((&manifest{}).text())
	f.Add([]byte("tensorferry set 1\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		var d codec.Digester
		_, _ = d.Write(text)
		for _, text := range [][]byte{text, fmt.Appendln(text, d.Sum())} { // a fuzzer finds no digest
			m, err := parseManifest(text)
			if err != nil {
				continue
			}
			require.Equal(t, string(text), string(m.text()))
			for _, m := range m.moves {
				require.Equal(t, m.temp, filepath.Base(m.temp))
				require.True(t, isTemp(m.temp) && isPushedName(m.file))
			}
		}
	})
}

func errorOf(_ store.Info, err error) error { return err }

// TestAChangeGetsThroughWhileTheFilesOfASetGetTheirNames stops a set at each of its files in
// turn. Meanwhile all of the set is read, and names of it are pushed and deleted; a process that
// ends then, or later, leaves that. Another set waits.
func TestAChangeGetsThroughWhileTheFilesOfASetGetTheirNames(t *testing.T) {
	var names []string
	taken := map[uint64]bool{}
	for i := 0; len(names) < 5; i++ { // whose locks differ
		name := fmt.Sprint("n", i)
		if lock := lockOf(fileName(name)); !taken[lock] {
			taken[lock] = true
			names = append(names, name)
		}
	}
	names, another := names[:4], names[4]
	for stopped := range names {
		t.Run(fmt.Sprint("stopped=", stopped), func(t *testing.T) {
			dir := t.TempDir()
			f := storetest.Close(t, openFolder(t, dir, Config{}))
			for _, name := range names[:2] {
				storetest.Put(t, f, name, []byte("old"))
			}
			is, goes := make(chan struct{}), make(chan struct{})
			f.rename = func(from, to string) error {
				if filepath.Base(to) == fileName(names[stopped]) && is != nil {
					close(is)
					is = nil
					<-goes
				}
				return os.Rename(from, to)
			}
			reached, done := is, make(chan error, 2)
			go func() { // ends with goes
				_, err := f.CommitAll(t.Context(), storetest.Begin(t, f, []byte("new"), names...))
				done <- err
			}()
			testkit.Receive(t, reached)
			want := map[string]string{}
			for _, name := range names {
				want[name] = "new"
			}
			holds := func(f *Store) {
				t.Helper()
				got := map[string]string{}
				for _, name := range storetest.Names(t, f) {
					if f.dir == dir && name == names[stopped] { // its name is locked
						got[name] = want[name]
						continue
					}
					got[name] = string(storetest.Get(t, f, name))
				}
				require.Equal(t, want, got)
			}
			crash := func() {
				t.Helper()
				killed := filepath.Join(t.TempDir(), "killed")
				require.NoError(t, os.CopyFS(killed, os.DirFS(dir)))
				f := storetest.Close(t, openFolder(t, killed, Config{}))
				holds(f)
				require.NoError(t, f.Close())
			}
			holds(f)
			crash()
			first, second := names[(stopped+1)%4], names[(stopped+2)%4]
			storetest.Put(t, f, first, []byte("later"))
			want[first] = "later"
			holds(f)
			crash()
			storetest.Remove(t, f, second)
			delete(want, second)
			storetest.Put(t, f, another, []byte("later"))
			want[another] = "later"
			holds(f)
			crash()
			go func() { // ends with goes
				_, err := f.CommitAll(t.Context(), storetest.Begin(t, f, []byte("last"), first, second))
				done <- err
			}()
			holds(f)
			close(goes)
			require.NoError(t, testkit.Receive(t, done))
			require.NoError(t, testkit.Receive(t, done))
			want[first], want[second] = "last", "last"
			stopped = -1
			for _, name := range names {
				require.Equal(t, want[name], string(storetest.Get(t, f, name)))
			}
			crash()
			for _, name := range filesIn(t, dir) {
				require.True(t, isPushedName(name), "%s is left", name)
			}
		})
	}
}

func TestASetWhoseFilesCannotBeNamedYetIsFinishedBeforeTheNextChange(t *testing.T) {
	f := storetest.Close(t, openFolder(t, t.TempDir(), Config{}))
	fails := true
	f.rename = func(from, to string) error {
		if fails && isPushedName(filepath.Base(to)) {
			return errFault
		}
		return os.Rename(from, to)
	}
	_, err := f.CommitAll(t.Context(), storetest.Begin(t, f, []byte("new"), "a", "b", "c"))
	require.NoError(t, err)
	require.True(t, hasSet(t, f))
	_, err = f.Delete(t.Context(), "a")
	require.ErrorIs(t, err, errFault)
	_, err = storetest.Begin(t, f, []byte("x"), "d")[0].Commit(t.Context())
	require.ErrorIs(t, err, errFault)
	require.True(t, hasSet(t, f))
	fails = false
	storetest.Put(t, f, "d", []byte("later"))
	storetest.Remove(t, f, "d")
	for _, name := range filesIn(t, f.dir) {
		require.True(t, isPushedName(name), "%s is left", name)
	}
	require.True(t, hasSet(t, f))
}
