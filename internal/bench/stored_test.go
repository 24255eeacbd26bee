package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
)

// shortTemp has temporary files go to a folder of the test's own. Its name is
// short: a Unix socket's path has 108 bytes.
func shortTemp(t *testing.T) {
	t.Helper()
	dir, err := os.MkdirTemp("", "b") //nolint:usetesting // t.TempDir is long
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	t.Setenv("TMPDIR", dir)
}

func newTestDisk(t *testing.T, mem Memory) *disk {
	t.Helper()
	shortTemp(t)
	d, err := newDisk(mem)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// empty fails the test if the folder of temporary files is not empty.
func empty(t *testing.T) {
	t.Helper()
	left, err := os.ReadDir(os.TempDir())
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestPushesAndPullsMoveEveryByteOverEveryNetwork(t *testing.T) {
	testkit.Start(t)
	for _, network := range []string{"tcp", "unix"} {
		for _, size := range []int{8, ChunkBytes, 3*ChunkBytes + 8} {
			t.Run(fmt.Sprintf("%s %d bytes", network, size), func(t *testing.T) {
				m := tensorMemory(size)
				d := newTestDisk(t, m)
				folder, folderEnds, err := newKeeper(t.Context(), network, d, func(*slab.Pool) store.Store { return d.store })
				if err != nil {
					t.Fatal(err)
				}
				kept := store.NewMemory(slab.NewPool(0, slab.System), slab.SizeOf(int64(size)))
				memory, memoryEnds, err := newKeeper(t.Context(), network, d, func(*slab.Pool) store.Store { return kept })
				if err != nil {
					t.Fatal(err)
				}
				ctx := t.Context()
				for name, do := range map[string]func() (Sample, error){
					"pull":           func() (Sample, error) { return folder.pull(ctx) },
					"pull to file":   func() (Sample, error) { return folder.pullToFile(ctx) },
					"push":           func() (Sample, error) { return folder.push(ctx) },
					"push to memory": func() (Sample, error) { return memory.push(ctx) },
					"cp":             func() (Sample, error) { return d.copied(ctx) },
				} {
					for range 2 {
						if s, err := do(); err != nil || s.Time <= 0 {
							t.Errorf("%s: %v, %v", name, s, err)
						}
					}
				}
				if names, err := os.ReadDir(d.dir); err != nil || len(names) != 1 {
					t.Errorf("beside the store lie %v, %v", names, err)
				}
				if infos, err := d.store.List(t.Context(), "pushed/*", "", 10); err != nil || len(infos) != 0 {
					t.Errorf("pushed tensors stayed: %v, %v", infos, err)
				}
				if err := errors.Join(folderEnds.Close(), memoryEnds.Close(), kept.Close(), d.Close()); err != nil {
					t.Fatal(err)
				}
				empty(t)
			})
		}
	}
}

func TestAFileThatDiffersIsFound(t *testing.T) {
	m := tensorMemory(2*ChunkBytes + 8)
	check := func(data []byte) error {
		path := filepath.Join(t.TempDir(), "copy")
		if err := os.WriteFile(path, append([]byte("header"), data...), 0o600); err != nil {
			t.Fatal(err)
		}
		return checkFile(path, m.Source)
	}
	if err := check(m.Source); err != nil {
		t.Error(err)
	}
	for _, i := range []int{0, ChunkBytes - 1, ChunkBytes, len(m.Source) - 1} {
		m.Back = append(m.Back[:0], m.Source...)
		m.Back[i] ^= 1
		if err := check(m.Back); err == nil {
			t.Errorf("byte %d differs", i)
		}
	}
	if err := check(m.Source[:len(m.Source)-8]); err == nil {
		t.Error("the end is missing")
	}
}

func TestAWorkWhoseBytesAreOthersHasNoTime(t *testing.T) {
	testkit.Start(t)
	m := tensorMemory(ChunkBytes)
	d := newTestDisk(t, m)
	k, ends, err := newKeeper(t.Context(), "tcp", d, func(*slab.Pool) store.Store { return d.store })
	if err != nil {
		t.Fatal(err)
	}
	m.Source[100] ^= 1 // not what lies in the folder
	for name, do := range map[string]func(context.Context) (Sample, error){
		"pull":         k.pull,
		"pull to file": k.pullToFile,
		"push":         k.push,
	} {
		if s, err := do(t.Context()); err == nil || s != (Sample{}) || !strings.Contains(err.Error(), "chunk 0") {
			t.Errorf("%s: got %v, %v", name, s, err)
		}
	}
	if err := errors.Join(ends.Close(), d.Close()); err != nil {
		t.Fatal(err)
	}
	empty(t)
}

func TestAnInterruptedRunLeavesNothingOnTheDisk(t *testing.T) {
	testkit.Start(t)
	for _, work := range []string{pull, pullToFile, push, pushToMemory} {
		t.Run(work, func(t *testing.T) {
			shortTemp(t)
			ctx, cancel := context.WithCancel(t.Context())
			c := Smoke(nil)
			c.Progress = func(text string) {
				if strings.Contains(text, " "+work+" ") {
					cancel()
				}
			}
			if err := c.stored(ctx, new(Report), "tcp", tensorMemory(4*ChunkBytes)); !errors.Is(err, context.Canceled) {
				t.Errorf("got %v", err)
			}
			empty(t)
		})
	}
}

func TestADiskThatIsNotThereIsNotMeasured(t *testing.T) {
	testkit.Start(t)
	t.Setenv("TMPDIR", filepath.Join(t.TempDir(), "missing"))
	if err := Smoke(nil).stored(t.Context(), new(Report), "tcp", tensorMemory(8)); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("got %v", err)
	}
}
