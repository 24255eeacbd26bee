package store

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/slab"
)

const (
	benchChunk = 1 * mib
	benchView  = 16 * kib // what gRPC's buffers hold
)

// BenchmarkPush pushes a tensor into each store in chunks as they come from the
// wire and, beside it, writes the same bytes to a file with nothing but write and
// fsync, over the file before.
func BenchmarkPush(b *testing.B) {
	for _, size := range []int64{1 * mib, 64 * mib, 1024 * mib} {
		if testing.Short() && size > 64*mib {
			continue
		}
		name := map[int64]string{1 * mib: "bytes=1MiB", 64 * mib: "bytes=64MiB", 1024 * mib: "bytes=1GiB"}[size]
		chunk := testkit.Bytes(benchChunk, 1)
		views := slices.Collect(slices.Chunk(chunk, benchView))
		dir := b.TempDir()
		b.Run(name+"/to=file", func(b *testing.B) {
			b.SetBytes(size)
			for b.Loop() {
				f, err := os.Create(filepath.Join(dir, "plain"))
				require.NoError(b, err)
				for range size / benchChunk {
					_, err := f.Write(chunk)
					require.NoError(b, err)
				}
				require.NoError(b, f.Sync())
				require.NoError(b, f.Close())
			}
		})
		for to, s := range map[string]Store{
			"folder": closing(b, openFolder(b, filepath.Join(dir, "folder"), FolderConfig{})),
			"memory": closing(b, NewMemory(slab.NewPool(2*size, slab.System), 3*size)),
		} {
			b.Run(name+"/to="+to, func(b *testing.B) {
				b.SetBytes(size)
				b.ReportAllocs()
				for b.Loop() {
					w, err := s.Create(b.Context(), "x", vector(size), nil)
					require.NoError(b, err)
					for off := int64(0); off < size; off += benchChunk {
						require.NoError(b, w.WriteViews(b.Context(), off, views))
					}
					_, err = w.Commit(b.Context())
					require.NoError(b, err)
				}
			})
		}
		require.NoError(b, os.RemoveAll(dir))
	}
}

// BenchmarkDelete deletes small tensors from a folder, as many as one request names at
// a time, and one by one.
func BenchmarkDelete(b *testing.B) {
	const count = 256
	for name, atATime := range map[string]int{"at-a-time=256": count, "at-a-time=1": 1} {
		b.Run("tensors=256/"+name, func(b *testing.B) {
			f := closing(b, openFolder(b, b.TempDir(), FolderConfig{}))
			names := make([]string, count)
			for b.Loop() {
				b.StopTimer()
				for i := range names {
					names[i] = strconv.Itoa(i)
					put(b, f, names[i], []byte(names[i]))
				}
				b.StartTimer()
				for some := range slices.Chunk(names, atATime) {
					remove(b, f, some...)
				}
			}
		})
	}
}

// BenchmarkListAfterAPush lists a few tensors of a folder that has just changed, as one
// does that takes pushes: it is looked at anew.
func BenchmarkListAfterAPush(b *testing.B) {
	for _, count := range []int{1000, 30_000} {
		b.Run(fmt.Sprintf("tensors=%d", count), func(b *testing.B) {
			dir := b.TempDir()
			for i := range count { // written without fsync: that is not what takes time here
				info := Info{Name: fmt.Sprintf("%05d", i), Desc: vector(1), Stored: time.Unix(1, 0)}
				header, err := pushedHeader(info)
				require.NoError(b, err)
				require.NoError(b, os.WriteFile(filepath.Join(dir, fileName(info.Name)), append(header, 1), 0o644))
			}
			f, _, files := openDir(b, dir, FolderConfig{})
			for b.Loop() {
				files.scan.settled = false
				require.Len(b, must(f.List(b.Context(), "", "", 10)), 10)
			}
		})
	}
}

// BenchmarkView reads a tensor that lies in the page cache, as a pull does, by
// touching each of its pages.
func BenchmarkView(b *testing.B) {
	const size = 256 * mib
	dir := b.TempDir()
	for from, s := range map[string]Store{
		"folder": closing(b, openFolder(b, filepath.Join(dir, "folder"), FolderConfig{})),
		"memory": closing(b, NewMemory(slab.NewPool(0, slab.System), size)),
	} {
		put(b, s, "x", make([]byte, size))
		b.Run("bytes=256MiB/from="+from, func(b *testing.B) {
			b.SetBytes(size)
			b.ReportAllocs()
			into := make([]byte, benchChunk)
			for b.Loop() {
				r, err := s.Open(b.Context(), "x")
				require.NoError(b, err)
				for off := int64(0); off < size; off += benchChunk {
					data, held, err := r.View(b.Context(), off, benchChunk)
					require.NoError(b, err)
					copy(into, data)
					held.Release()
				}
				r.Release()
			}
		})
	}
}
