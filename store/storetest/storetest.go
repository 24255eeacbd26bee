// Package storetest is the suite that every store passes: what a server, and whoever
// pushes and pulls, rely on. A store of your own runs it from a test:
//
//	func TestMine(t *testing.T) {
//		storetest.Run(t, func(t testing.TB) store.Store { return openMine(t) })
//	}
//
// It refuses to know where a store keeps its bytes, and what becomes of them when a
// process or a machine ends, which is for tests of the store's own. Only tests call
// it; it lends a store nothing but the bytes that it pushes.
package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

const (
	mib = 1 << 20
	// viewBytes is how much of a view the suite pushes at a time. Nothing a store
	// knows of is a multiple of it.
	viewBytes = 1000
)

// errStopped is the cause of contexts that have ended.
var errStopped = errors.New("stopped")

// Run holds stores to the contract of package store. open makes an empty one with
// room for 64 MiB in tensors of up to 10 MiB; Run closes it. Its tests are subtests,
// one after the other, each with a store of its own. It starts goroutines, and ends
// after all of them. A store whose Writers are InPlace is tested with and without it.
func Run(t *testing.T, open func(t testing.TB) store.Store) {
	run(t, open)
	s := open(t)
	w := begin(t, s, "x")
	_, inPlace := w.(store.InPlace)
	w.Abort()
	require.NoError(t, s.Close())
	if inPlace {
		t.Run("in place", func(t *testing.T) {
			run(t, func(t testing.TB) store.Store { return direct{open(t)} })
		})
	}
}

func run(t *testing.T, open func(t testing.TB) store.Store) {
	for _, test := range []struct {
		name string
		run  func(t *testing.T, s store.Store)
	}{
		{"what is pushed is pulled", pulled},
		{"chunks may come in any order", anyOrder},
		{"many and empty views are written", manyViews},
		{"nothing is seen before commit nor after abort", unseen},
		{"the last one to commit stays", lastStays},
		{"a reader keeps what it opened when it is replaced", keeps(replaced)},
		{"a reader keeps what it opened when it is deleted", keeps(deleted)},
		{"a reader keeps what it opened when it is replaced and deleted", keeps(replacedAndDeleted)},
		{"a reader keeps what it opened when the store is closed", keeps(closed)},
		{"room comes back when the last reader is done", room},
		{"what cannot be is refused", refused},
		{"many are deleted at a time", manyDeleted},
		{"bytes outside a tensor are neither written nor read", outside},
		{"a closed store says so", closedSays},
		{"a context that has ended is the only other reason to fail", endedContext},
		{"an info is a copy", copied},
		{"a list is what a sorted slice gives", listed},
		{"many at once see only whole tensors", together},
		{"a set is committed together", setCommitted},
		{"a set that cannot be committed changes nothing", setRefused},
		{"many at once see only whole sets", setsWhole},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := open(t)
			t.Cleanup(func() {
				if err := s.Close(); err != nil && !errors.Is(err, store.ErrClosed) {
					t.Error(err)
				}
			})
			test.run(t, s)
		})
	}
}

// direct is a store whose Writers get all bytes in their own memory.
type direct struct{ store.Store }

func (d direct) Create(ctx context.Context, name string, desc tensor.Desc) (store.Writer, error) {
	w, err := d.Store.Create(ctx, name, desc)
	if err != nil {
		return nil, err
	}
	return directWriter{w, w.(store.InPlace).Memory()}, nil
}

type directWriter struct {
	store.Writer
	memory []byte
}

func (w directWriter) WriteViews(ctx context.Context, off int64, views [][]byte) error {
	data := slices.Concat(views...)
	if off < 0 || off > int64(len(w.memory)-len(data)) {
		return w.Writer.WriteViews(ctx, off, views)
	}
	mine := w.memory[off:][:len(data)]
	copy(mine, data)
	return w.Writer.WriteViews(ctx, off, slices.Collect(slices.Chunk(mine, viewBytes)))
}

// testingT is what of testing.T and rapid.T is used.
type testingT interface {
	require.TestingT
	Helper()
	Context() context.Context
	Fatalf(format string, args ...any)
}

func vector(n int64) tensor.Desc { return tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{n}} }

// random returns bytes that the seed determines.
func random(n int, seed uint64) []byte {
	b := make([]byte, n)
	source := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
	_, _ = source.Read(b) // it never fails
	return b
}

func digestOf(data []byte) codec.Digest {
	var d codec.Digester
	_, _ = d.Write(data) // it never fails
	return d.Sum()
}

// push writes a tensor in pieces of at most chunk bytes, each in views of at most
// viewBytes, in the order that order gives to the pieces' indexes.
func push(ctx context.Context, s store.Store, name string, d tensor.Desc, data []byte, chunk int, order func([]int)) (store.Info, error) {
	w, err := s.Create(ctx, name, d)
	if err != nil {
		return store.Info{}, err
	}
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
		if err := w.WriteViews(ctx, int64(i*chunk), slices.Collect(slices.Chunk(chunks[i], viewBytes))); err != nil {
			return store.Info{}, err
		}
	}
	return w.Commit(ctx)
}

// put pushes bytes in one piece.
func put(t testingT, s store.Store, name string, data []byte) store.Info {
	t.Helper()
	info, err := push(t.Context(), s, name, vector(int64(len(data))), data, max(len(data), 1), nil)
	require.NoError(t, err)
	return info
}

// remove deletes tensors that are there.
func remove(t testingT, s store.Store, names ...string) {
	t.Helper()
	deleted, err := s.Delete(t.Context(), names...)
	require.NoError(t, err)
	require.Equal(t, names, deleted)
}

// list lists names.
func list(t testingT, s store.Store, glob, after string, most int) []string {
	t.Helper()
	infos, err := s.List(t.Context(), glob, after, most)
	require.NoError(t, err)
	var names []string
	for _, info := range infos {
		names = append(names, info.Name)
	}
	return names
}

// read reads all of a tensor, at most piece bytes at a time, and holds it to its
// digest.
func read(ctx context.Context, r store.Reader, piece int64) ([]byte, error) {
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

// get opens, reads and releases a tensor.
func get(t testingT, s store.Store, name string) []byte {
	t.Helper()
	r, err := s.Open(t.Context(), name)
	require.NoError(t, err)
	defer r.Release()
	got, err := read(t.Context(), r, 1*mib)
	require.NoError(t, err)
	return got
}

// holds fails unless the tensor has these bytes. It does not print them.
func holds(t testingT, s store.Store, name string, data []byte, what string) {
	t.Helper()
	if !bytes.Equal(data, get(t, s, name)) {
		t.Fatalf("tensor %q has other bytes: %s", name, what)
	}
}
