package memory

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/storetest"
	"github.com/tensorferry/tensorferry/tensor"
)

const (
	kib = 1 << 10
	mib = 1 << 20
)

func TestMemoryIsAStore(t *testing.T) {
	storetest.Run(t, func(t testing.TB) store.Store { return New(testkit.Pool(t), 64<<20) })
}

func TestACacheForgetsWhatWasUsedLongestAgo(t *testing.T) {
	m := storetest.Close(t, NewCache(testkit.Pool(t), 3*4*kib))
	for _, name := range []string{"a", "b", "c"} {
		storetest.Put(t, m, name, []byte(name))
	}
	storetest.Get(t, m, "a")
	w, err := m.Create(t.Context(), "d", storetest.Vector(1), nil)
	require.NoError(t, err)
	gone := w.(store.Evicter).Evicted()
	require.Len(t, gone, 1)
	require.Equal(t, "b", gone[0].Name)
	require.NoError(t, w.WriteViews(t.Context(), 0, [][]byte{[]byte("d")}))
	testkit.Must(w.Commit(t.Context()))
	_, err = m.Open(t.Context(), "b")
	require.ErrorIs(t, err, store.ErrNotFound)
	for _, name := range []string{"a", "c", "d"} {
		require.Equal(t, []byte(name), storetest.Get(t, m, name))
	}
}

func TestAFullMemoryRefusesAndForgetsNothing(t *testing.T) {
	m := storetest.Close(t, New(testkit.Pool(t), 4*4*kib))
	storetest.Put(t, m, "small", []byte{1})
	storetest.Put(t, m, "x", make([]byte, 2*4*kib))
	_, err := m.Create(t.Context(), "y", storetest.Vector(2*4*kib), nil)
	require.ErrorIs(t, err, store.ErrFull)
	require.ErrorContains(t, err, `tensor "y" needs 4096 bytes more than the 4096 that are free; delete some tensors`)
	_, err = m.Create(t.Context(), "x", storetest.Vector(2*4*kib), nil)
	require.ErrorIs(t, err, store.ErrFull)
	require.ErrorContains(t, err, "needs 4096 bytes more than the 4096 that are free (the older one, of 8192, stays until the new one is complete)")
	require.Equal(t, []byte{1}, storetest.Get(t, m, "small"))
	require.Len(t, storetest.Get(t, m, "x"), 2*4*kib)
	w, err := m.Create(t.Context(), "x", storetest.Vector(1*4*kib), nil)
	require.NoError(t, err)
	require.Empty(t, w.(store.Evicter).Evicted())
	w.Abort()
}

func TestACacheKeepsATensorUntilItIsReplaced(t *testing.T) {
	m := storetest.Close(t, NewCache(testkit.Pool(t), 4*4*kib))
	storetest.Put(t, m, "x", make([]byte, 2*4*kib)) // used longest ago
	storetest.Put(t, m, "a", []byte{1})
	storetest.Put(t, m, "b", []byte{2})
	_, err := m.Create(t.Context(), "x", storetest.Vector(3*4*kib), nil)
	require.ErrorIs(t, err, store.ErrFull)
	require.ErrorContains(t, err, "the older one, of 8192, stays")
	require.Len(t, testkit.Must(m.List(t.Context(), "", "", 10)), 3, "nobody else is evicted in vain")
	w, err := m.Create(t.Context(), "x", storetest.Vector(2*4*kib), nil)
	require.NoError(t, err)
	require.Len(t, w.(store.Evicter).Evicted(), 2)
	require.Len(t, storetest.Get(t, m, "x"), 2*4*kib, "the older one is there")
	testkit.Must(w.Commit(t.Context()))
	require.Len(t, testkit.Must(m.List(t.Context(), "", "", 10)), 1)
}

func TestATensorTakesItsPagesAndItsMetadata(t *testing.T) {
	pool := testkit.Pool(t)
	m := storetest.Close(t, New(pool, 16*mib))
	for _, tc := range []struct{ size, pages int64 }{{0, 1}, {1, 1}, {4 * kib, 1}, {4*kib + 1, 2}, {100_000, 25}, {2_400_000, 586}} {
		w, err := m.Create(t.Context(), "x", storetest.Vector(tc.size), map[string]string{"unit": "m/s"})
		require.NoError(t, err)
		used, _ := m.Used()
		require.Equal(t, tc.pages*4*kib+7, used)
		_, bytes := pool.Live()
		require.Equal(t, tc.pages*4*kib, bytes)
		w.Abort()
	}
}

func TestACacheThatIsAllInUseIsFull(t *testing.T) {
	m := storetest.Close(t, NewCache(testkit.Pool(t), 3*4*kib))
	storetest.Put(t, m, "read", []byte{1})
	storetest.Put(t, m, "idle", []byte{2})
	r, err := m.Open(t.Context(), "read")
	require.NoError(t, err)
	w, err := m.Create(t.Context(), "written", storetest.Vector(5), nil)
	require.NoError(t, err)

	_, err = m.Create(t.Context(), "x", storetest.Vector(3*4*kib+1), nil)
	require.ErrorIs(t, err, store.ErrFull)
	require.ErrorContains(t, err, "the limit is 12288")
	_, err = m.Create(t.Context(), "x", storetest.Vector(8*kib), nil)
	require.ErrorIs(t, err, store.ErrFull)
	require.ErrorContains(t, err, "needs 4096 more bytes; the limit is 12288, of which 8192 are being read or written, or replaced")
	require.Equal(t, []byte{2}, storetest.Get(t, m, "idle"), "nothing is forgotten in vain")

	_, held, err := r.View(t.Context(), 0, 1)
	require.NoError(t, err)
	r.Release()
	_, err = m.Create(t.Context(), "x", storetest.Vector(8*kib), nil)
	require.ErrorIs(t, err, store.ErrFull, "a view is a reader")
	held.Release()
	w.Abort()
	storetest.Put(t, m, "x", make([]byte, 12*kib))
	require.Len(t, testkit.Must(m.List(t.Context(), "", "", 10)), 1)
}

func TestAListIsLongerThanAPage(t *testing.T) {
	m := storetest.Close(t, New(testkit.Pool(t), 16*mib))
	for i := range 2*store.PageNames + 1 {
		storetest.Put(t, m, fmt.Sprintf("%05d", i), nil)
	}
	require.Len(t, testkit.Must(m.List(t.Context(), "", "", 1<<20)), 2*store.PageNames+1)
	require.Len(t, testkit.Must(m.List(t.Context(), "*7", "", 1<<20)), 204+1)
	require.Equal(t, "02048", testkit.Must(m.List(t.Context(), "*8", "02039", 1))[0].Name)
}

func TestReleasingATensorTooOftenPanics(t *testing.T) {
	m := New(slab.NewPool(0, slab.System), 1*mib)
	storetest.Put(t, m, "x", []byte{1})
	r, err := m.Open(t.Context(), "x")
	require.NoError(t, err)
	storetest.Remove(t, m, "x")
	r.Release()
	require.PanicsWithValue(t, "store: released more often than retained", r.Release)
}

// lru is the slow, obvious model of a cache: names, the one used last at the end.
type lru struct {
	order []string
	size  map[string]int64 // in pages
	pins  map[string]int
}

func (l *lru) used() (n int64) {
	for _, size := range l.size {
		n += size
	}
	return n
}

func (l *lru) drop(name string) {
	l.order = slices.DeleteFunc(l.order, func(n string) bool { return n == name })
	delete(l.size, name)
}

// room makes room for n of limit pages for a tensor, or changes nothing.
func (l *lru) room(of string, n, limit int64) bool {
	idle := int64(0)
	for name, size := range l.size {
		if l.pins[name] == 0 && name != of {
			idle += size
		}
	}
	if l.used()-idle+n > limit {
		return false
	}
	for l.used()+n > limit {
		for _, name := range l.order {
			if l.pins[name] == 0 && name != of {
				l.drop(name)
				break
			}
		}
	}
	return true
}

func TestACacheForgetsLikeItsModel(t *testing.T) {
	const limit = 6 // pages
	rapid.Check(t, func(t *rapid.T) {
		pool := slab.NewPool(0, slab.System)
		m := NewCache(pool, limit*4*kib)
		model := &lru{size: map[string]int64{}, pins: map[string]int{}}
		readers := map[string][]store.Reader{}
		names := rapid.SampledFrom([]string{"a", "b", "c", "d", "e", "f", "g"})
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			name := names.Draw(t, "name")
			switch rapid.SampledFrom([]string{"push", "push", "open", "open", "release", "delete"}).Draw(t, "step") {
			case "push":
				if model.pins[name] > 0 {
					continue // what a reader keeps of a replaced tensor has a test of its own
				}
				pages := rapid.Int64Range(1, limit).Draw(t, "pages")
				w, err := m.Create(t.Context(), name, storetest.Vector(pages*4*kib), nil)
				if ok := model.room(name, pages, limit); ok != (err == nil) || !ok && !errors.Is(err, store.ErrFull) {
					t.Fatalf("create %s of %d pages: %v; the model has room: %v", name, pages, err, ok)
				}
				if err != nil {
					continue
				}
				if rapid.Bool().Draw(t, "abort") {
					w.Abort()
					continue
				}
				testkit.Must(w.Commit(t.Context()))
				model.drop(name)
				model.order = append(model.order, name)
				model.size[name] = pages
			case "open":
				r, err := m.Open(t.Context(), name)
				if _, ok := model.size[name]; ok != (err == nil) {
					t.Fatalf("open %s: %v; the model has it: %v", name, err, ok)
				}
				if err == nil {
					readers[name] = append(readers[name], r)
					model.pins[name]++
					model.order = append(slices.DeleteFunc(model.order, func(n string) bool { return n == name }), name)
				}
			case "release":
				if rs := readers[name]; len(rs) > 0 {
					rs[0].Release()
					readers[name] = rs[1:]
					model.pins[name]--
				}
			case "delete":
				if model.pins[name] > 0 {
					continue
				}
				deleted, err := m.Delete(t.Context(), name)
				if _, ok := model.size[name]; err != nil || ok != (len(deleted) == 1) {
					t.Fatalf("delete %s: %v, %v; the model has it: %v", name, deleted, err, ok)
				}
				model.drop(name)
			}
			var got []string
			for _, info := range testkit.Must(m.List(t.Context(), "", "", 100)) {
				got = append(got, info.Name)
			}
			want := slices.Sorted(slices.Values(model.order))
			used, _ := m.Used()
			if !slices.Equal(want, got) || used != model.used()*4*kib {
				t.Fatalf("there are %q in %d bytes, want %q in %d pages", got, used, want, model.used())
			}
		}
		for _, rs := range readers {
			for _, r := range rs {
				r.Release()
			}
		}
		require.NoError(t, m.Close())
		if slabs, bytes := pool.Live(); slabs != 0 {
			t.Fatal(fmt.Sprintf("%d slabs of %d bytes are left", slabs, bytes))
		}
	})
}

func TestBytesWrittenInPlaceAreNotCopied(t *testing.T) {
	m := storetest.Close(t, New(testkit.Pool(t), 1*mib))
	w, err := m.Create(t.Context(), "x", storetest.Vector(3), nil)
	require.NoError(t, err)
	defer w.Abort()
	mine := w.(store.InPlace).Memory()
	copy(mine, "abc")
	require.NoError(t, w.WriteViews(t.Context(), 0, [][]byte{mine[:2], nil, mine[2:]}))
	testkit.Must(w.Commit(t.Context()))
	r, err := m.Open(t.Context(), "x")
	require.NoError(t, err)
	defer r.Release()
	data, held, err := r.View(t.Context(), 0, 3)
	require.NoError(t, err)
	defer held.Release()
	require.Equal(t, "abc", string(data))
	require.Same(t, &mine[0], &data[0])
}

// TestWhatCanNeverFitIsSaidToBeTooLarge: a server does not tell its peers to try again.
func TestWhatCanNeverFitIsSaidToBeTooLarge(t *testing.T) {
	testkit.Start(t)
	m := New(slab.NewPool(0, slab.System), 8192)
	defer m.Close()
	_, err := m.Create(t.Context(), "large", tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{8193}}, nil)
	require.ErrorIs(t, err, store.ErrFull)
	require.ErrorIs(t, err, tensor.ErrTooLarge)
	w, err := m.Create(t.Context(), "whole", tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{8192}}, nil)
	require.NoError(t, err)
	defer w.Abort()
	_, err = m.Create(t.Context(), "later", tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{1}}, nil)
	require.ErrorIs(t, err, store.ErrFull)
	require.NotErrorIs(t, err, tensor.ErrTooLarge)
}
