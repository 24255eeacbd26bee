package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// T is what testing.T, testing.B and rapid.T have in common.
type T interface {
	rapid.TB
	Context() context.Context
	Cleanup(f func())
}

// Vector returns the desc of n bytes.
func Vector(n int64) tensor.Desc { return tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{n}} }

// Push writes a tensor, whose bytes it borrows, in pieces of at most chunk bytes, in the order
// that order, if it is not nil, gives to the pieces' indexes.
func Push(t T, s store.Store, name string, d tensor.Desc, data []byte, chunk int, order func([]int)) store.Info {
	t.Helper()
	info, err := suite{t, s, false}.push(name, d, data, chunk, order)
	require.NoError(t, err)
	return info
}

// Put pushes bytes, which it borrows, in one piece.
func Put(t T, s store.Store, name string, data []byte) store.Info {
	t.Helper()
	return suite{t, s, false}.put(name, data)
}

// Begin returns Writers that have written data, which it borrows, and are not committed. They
// are aborted when the test ends.
func Begin(t T, s store.Store, data []byte, names ...string) (set []store.Writer) {
	t.Helper()
	for _, name := range names {
		set = append(set, suite{t, s, false}.begin(name, data...))
	}
	return set
}

// Remove deletes tensors, which must exist.
func Remove(t T, s store.Store, names ...string) {
	t.Helper()
	deleted, err := s.Delete(t.Context(), names...)
	require.NoError(t, err)
	require.Equal(t, names, deleted)
}

// Names lists the names of all tensors.
func Names(t T, s store.Store) (names []string) {
	t.Helper()
	infos, err := s.List(t.Context(), "", "", 1<<20)
	require.NoError(t, err)
	for _, info := range infos {
		names = append(names, info.Name)
	}
	return names
}

// Get opens, reads and releases a tensor, and hands over its bytes, which its digest names.
func Get(t T, s store.Store, name string) []byte {
	t.Helper()
	r, err := s.Open(t.Context(), name)
	require.NoError(t, err)
	defer r.Release()
	data, err := Read(t.Context(), r, 1*mib)
	require.NoError(t, err)
	return data
}

// Read reads all of a tensor, at most piece bytes at a time, and hands over a copy. It returns
// an error if the tensor has another digest.
func Read(ctx context.Context, r store.Reader, piece int64) ([]byte, error) {
	info := r.Info()
	size, err := info.Bytes()
	if err != nil {
		return nil, err
	}
	var got []byte
	for off := int64(0); off < size; off += piece {
		n := min(piece, size-off)
		data, held, err := r.View(ctx, off, n)
		if err != nil {
			return nil, err
		}
		got = append(got, data...)
		held.Release()
		if int64(len(data)) != n {
			return nil, fmt.Errorf("tensor %q: a view of %d bytes at %d has %d", info.Name, n, off, len(data))
		}
	}
	if d := digestOf(got); !info.Digest.IsZero() && d != info.Digest {
		return nil, fmt.Errorf("tensor %q has digest %v, its bytes have %v", info.Name, info.Digest, d)
	}
	return got, nil
}

func digestOf(data []byte) codec.Digest {
	var d codec.Digester
	_, _ = d.Write(data) // it never fails
	return d.Sum()
}

// Close closes a store when the test ends, unless the test closes it.
func Close[S store.Store](t T, s S) S {
	t.Cleanup(func() {
		if err := s.Close(); err != nil && !errors.Is(err, store.ErrClosed) {
			t.Errorf("close the store: %v", err)
		}
	})
	return s
}

// Model hands over a .safetensors file of vectors of bytes.
func Model(t T, metadata, tensors map[string]string) []byte {
	t.Helper()
	var all []tensorfile.Named
	for name, data := range tensors {
		all = append(all, tensorfile.Named{Name: name, Tensor: tensor.Tensor{Desc: Vector(int64(len(data))), Data: []byte(data)}})
	}
	var file bytes.Buffer
	require.NoError(t, tensorfile.WriteSafetensors(&file, all, metadata))
	return file.Bytes()
}

// Place puts a file, whose bytes it borrows, into a folder, which it makes if need be. Nobody sees
// a part of the file.
func Place(t T, path string, data []byte) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(t, os.WriteFile(path+"~", data, 0o644))
	require.NoError(t, os.Rename(path+"~", path))
}
