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
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

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
	run(t, open, false)
	s := suite{t, open(t), false}
	_, can := s.begin("x").(store.InPlace)
	require.NoError(t, s.Close())
	if can {
		t.Run("in place", func(t *testing.T) { run(t, open, true) })
	}
}

func run(t *testing.T, open func(t testing.TB) store.Store, inPlace bool) {
	for _, test := range []struct {
		name string
		run  func(s suite)
	}{
		{"what is pushed is pulled", suite.pulled},
		{"chunks may come in any order", suite.anyOrder},
		{"many and empty views are written", suite.manyViews},
		{"nothing is seen before commit nor after abort", suite.unseen},
		{"the last one to commit stays", suite.lastStays},
		{"a reader keeps what it opened when it is replaced", keeps(suite.replace)},
		{"a reader keeps what it opened when it is deleted", keeps(func(s suite) { s.remove("x") })},
		{"a reader keeps what it opened when it is replaced and deleted", keeps(func(s suite) { s.replace(); s.remove("x") })},
		{"a reader keeps what it opened when the store is closed", keeps(func(s suite) { require.NoError(s, s.Close()) })},
		{"room comes back when the last reader is done", suite.room},
		{"what cannot be is refused", suite.refused},
		{"many are deleted at a time", suite.manyDeleted},
		{"bytes outside a tensor are neither written nor read", suite.outside},
		{"a closed store says so", suite.closedSays},
		{"a context that has ended is the only other reason to fail", suite.endedContext},
		{"an info is a copy", suite.copied},
		{"metadata comes back with its tensor", suite.metadata},
		{"a list is what a sorted slice gives", suite.listed},
		{"many at once see only whole tensors", suite.together},
		{"a set is committed together", suite.setCommitted},
		{"a set that cannot be committed changes nothing", suite.setRefused},
		{"many at once see only whole sets", suite.setsWhole},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.run(suite{t, Close(t, open(t)), inPlace})
		})
	}
}

// suite is a test and its store. Its methods fail the test if the store does.
type suite struct {
	T
	store.Store
	inPlace bool // Writers get all bytes in their own memory
}

// random returns bytes that the seed determines.
func random(n int, seed uint64) []byte {
	b := make([]byte, n)
	source := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
	_, _ = source.Read(b) // it never fails
	return b
}

// begin creates a tensor of these bytes and writes them, without Commit.
func (s suite) begin(name string, data ...byte) store.Writer {
	s.Helper()
	w, err := s.Create(s.Context(), name, Vector(int64(len(data))), nil)
	require.NoError(s, err)
	s.Cleanup(w.Abort)
	require.NoError(s, s.write(w, 0, data))
	return w
}

func (s suite) write(w store.Writer, off int64, views ...[]byte) error {
	if s.inPlace {
		data, memory := slices.Concat(views...), w.(store.InPlace).Memory()
		if off >= 0 && off <= int64(len(memory)-len(data)) {
			views = slices.Collect(slices.Chunk(memory[off:][:copy(memory[off:], data)], viewBytes))
		}
	}
	return w.WriteViews(s.Context(), off, views)
}

// push writes a tensor in pieces of at most chunk bytes, each in views of at most
// viewBytes, in the order that order gives to the pieces' indexes.
func (s suite) push(name string, d tensor.Desc, data []byte, chunk int, order func([]int)) (store.Info, error) {
	w, err := s.Create(s.Context(), name, d, nil)
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
		if err := s.write(w, int64(i*chunk), slices.Collect(slices.Chunk(chunks[i], viewBytes))...); err != nil {
			return store.Info{}, err
		}
	}
	return w.Commit(s.Context())
}

// put pushes bytes in one piece.
func (s suite) put(name string, data []byte) store.Info {
	s.Helper()
	info, err := s.push(name, Vector(int64(len(data))), data, max(len(data), 1), nil)
	require.NoError(s, err)
	return info
}

// remove deletes tensors that are there.
func (s suite) remove(names ...string) {
	s.Helper()
	Remove(s, s, names...)
}

// list lists tensors, and their names.
func (s suite) list(glob, after string, most int) (infos []store.Info, names []string) {
	s.Helper()
	infos, err := s.List(s.Context(), glob, after, most)
	require.NoError(s, err)
	for _, info := range infos {
		names = append(names, info.Name)
	}
	return infos, names
}

// names lists the names of all tensors.
func (s suite) names() []string {
	s.Helper()
	return Names(s, s)
}

func (s suite) open(name string) store.Reader {
	s.Helper()
	r, err := s.Open(s.Context(), name)
	require.NoError(s, err)
	return r
}

// get opens, reads and releases a tensor.
func (s suite) get(name string) []byte {
	s.Helper()
	return Get(s, s, name)
}

// holds fails unless the tensor has these bytes. It does not print them.
func (s suite) holds(name string, data []byte, what string) {
	s.Helper()
	if !bytes.Equal(data, s.get(name)) {
		s.Fatalf("tensor %q has other bytes: %s", name, what)
	}
}
