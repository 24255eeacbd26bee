package store

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/tensor"
)

const kib = 1 << 10

func openFolder(t testing.TB, dir string, config FolderConfig) *Folder {
	t.Helper()
	f, err := OpenFolder(dir, config)
	require.NoError(t, err)
	return f
}

// openDir opens a folder and the files of others in it.
func openDir(t testing.TB, dir string, config FolderConfig) (Store, *Folder, *Files) {
	t.Helper()
	s, err := OpenDir(dir, config)
	require.NoError(t, err)
	b := s.(struct {
		Store
		Meter
		Sets
	}).Store.(*beside)
	return closing(t, s), b.main.(*Folder), b.files[0]
}

func closing[S Store](t testing.TB, s S) S {
	t.Cleanup(func() {
		if err := s.Close(); err != nil && !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	})
	return s
}

func vector(n int64) tensor.Desc { return tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{n}} }

// testingT is what of testing.T and rapid.T the helpers use.
type testingT interface {
	require.TestingT
	Helper()
	Context() context.Context
	Fatalf(format string, args ...any)
}

// push writes a tensor in pieces of at most chunk bytes, each in views of at most
// 1000, in the order that order gives to the pieces' indexes.
func push(t testingT, s Store, name string, d tensor.Desc, data []byte, chunk int, order func([]int)) Info {
	t.Helper()
	w, err := s.Create(t.Context(), name, d, nil)
	require.NoError(t, err)
	defer w.Abort()
	chunks := slices.Collect(slices.Chunk(data, chunk))
	at := make([]int, len(chunks))
	for i := range at {
		at[i] = i
	}
	if order != nil {
		order(at)
	}
	for _, i := range at {
		require.NoError(t, w.WriteViews(t.Context(), int64(i*chunk), slices.Collect(slices.Chunk(chunks[i], 1000))))
	}
	info, err := w.Commit(t.Context())
	require.NoError(t, err)
	return info
}

// put pushes bytes in one piece.
func put(t testingT, s Store, name string, data []byte) Info {
	t.Helper()
	return push(t, s, name, vector(int64(len(data))), data, max(len(data), 1), nil)
}

// remove deletes tensors that are there.
func remove(t testingT, s Store, names ...string) {
	t.Helper()
	deleted, err := s.Delete(t.Context(), names...)
	require.NoError(t, err)
	require.Equal(t, names, deleted)
}

func read(t testingT, r Reader, chunk int64) []byte {
	t.Helper()
	size, err := r.Info().Bytes()
	require.NoError(t, err)
	var got []byte
	for off := int64(0); off < size; off += chunk {
		data, held, err := r.View(t.Context(), off, min(chunk, size-off))
		require.NoError(t, err)
		got = append(got, data...)
		held.Release()
	}
	return got
}

// get opens, reads and releases a tensor, and holds its bytes to its digest.
func get(t testingT, s Store, name string) []byte {
	t.Helper()
	r, err := s.Open(t.Context(), name)
	require.NoError(t, err)
	defer r.Release()
	got := read(t, r, 1*mib)
	var d codec.Digester
	_, _ = d.Write(got)
	if want := r.Info().Digest; !want.IsZero() && d.Sum() != want {
		t.Fatalf("tensor %q has digest %v, its bytes have %v", name, want, d.Sum())
	}
	return got
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
