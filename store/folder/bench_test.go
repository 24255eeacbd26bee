package folder

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/memory"
	"github.com/tensorferry/tensorferry/store/storetest"
)

const (
	mib        = 1 << 20
	benchChunk = 1 * mib
	benchView  = 16 << 10 // what gRPC's buffers hold
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
		for to, s := range map[string]store.Store{
			"folder": storetest.Close(b, openFolder(b, filepath.Join(dir, "folder"), Config{})),
			"memory": storetest.Close(b, memory.New(slab.NewPool(2*size, slab.System), 3*size)),
		} {
			b.Run(name+"/to="+to, func(b *testing.B) {
				b.SetBytes(size)
				b.ReportAllocs()
				for b.Loop() {
					w, err := s.Create(b.Context(), "x", storetest.Vector(size), nil)
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
			f := storetest.Close(b, openFolder(b, b.TempDir(), Config{}))
			names := make([]string, count)
			for b.Loop() {
				b.StopTimer()
				for i := range names {
					names[i] = strconv.Itoa(i)
					storetest.Put(b, f, names[i], []byte(names[i]))
				}
				b.StartTimer()
				for some := range slices.Chunk(names, atATime) {
					storetest.Remove(b, f, some...)
				}
			}
		})
	}
}

// BenchmarkView reads a tensor that lies in the page cache, as a pull does, by
// touching each of its pages.
func BenchmarkView(b *testing.B) {
	const size = 256 * mib
	dir := b.TempDir()
	for from, s := range map[string]store.Store{
		"folder": storetest.Close(b, openFolder(b, filepath.Join(dir, "folder"), Config{})),
		"memory": storetest.Close(b, memory.New(slab.NewPool(0, slab.System), size)),
	} {
		storetest.Put(b, s, "x", make([]byte, size))
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
