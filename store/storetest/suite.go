package storetest

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

func pulled(t *testing.T, s store.Store) {
	wide := make(tensor.Shape, tensor.MaxRank)
	for i := range wide {
		wide[i] = 1
	}
	wide[3], wide[30] = 3, 5
	var want []store.Info
	for _, dtype := range tensor.DataTypes() {
		for _, shape := range []tensor.Shape{nil, {0}, {1}, {7, 3}, {2, 0, 4}, wide} {
			d := tensor.Desc{DType: dtype, Shape: shape}
			size, err := d.Bytes()
			require.NoError(t, err)
			name := fmt.Sprintf("%v/%v", d, len(shape))
			data := random(int(size), uint64(size)+1)
			info, err := push(t.Context(), s, name, d, data, max(int(size), 1), nil)
			require.NoError(t, err)
			require.Equal(t, store.Info{Name: name, Desc: d, Digest: digestOf(data), Stored: info.Stored, Durable: info.Durable}, info)
			require.False(t, info.Stored.IsZero())
			holds(t, s, name, data, "pushed in one piece")
			r, err := s.Open(t.Context(), name)
			require.NoError(t, err)
			require.Empty(t, cmp.Diff(info, r.Info()))
			r.Release()
			want = append(want, info)
		}
	}
	slices.SortFunc(want, func(a, b store.Info) int { return strings.Compare(a.Name, b.Name) })
	got, err := s.List(t.Context(), "", "", len(want)+1)
	require.NoError(t, err)
	require.Empty(t, cmp.Diff(want, got))
}

func anyOrder(t *testing.T, s store.Store) {
	shuffle := rand.New(rand.NewPCG(1, 2)).Shuffle
	for _, chunk := range []int{1000, 16384, 65536} {
		for _, size := range []int{0, 1, chunk - 1, chunk, chunk + 1, 2 * chunk, 2*chunk + 1, 16383, 16384, 16385, mib/4 + 1, 9*mib + 5} {
			data := random(size, 7)
			for name, order := range map[string]func([]int){
				"in order":       nil,
				"backwards":      slices.Reverse[[]int],
				"the last first": func(at []int) { slices.Reverse(at); slices.Sort(at[min(1, len(at)):]) },
				"in any order":   func(at []int) { shuffle(len(at), func(i, j int) { at[i], at[j] = at[j], at[i] }) },
			} {
				if size == 0 && order != nil {
					continue
				}
				_, err := push(t.Context(), s, name, vector(int64(size)), data, chunk, order)
				require.NoError(t, err)
				holds(t, s, name, data, fmt.Sprintf("%d bytes %s in chunks of %d", size, name, chunk))
			}
		}
	}
}

// begin creates a tensor of these bytes and writes them, without Commit.
func begin(t testing.TB, s store.Store, name string, data ...byte) store.Writer {
	t.Helper()
	w, err := s.Create(t.Context(), name, vector(int64(len(data))))
	require.NoError(t, err)
	t.Cleanup(w.Abort)
	require.NoError(t, w.WriteViews(t.Context(), 0, [][]byte{data}))
	return w
}

func manyViews(t *testing.T, s store.Store) {
	data := random(3*1024+1, 3) // three times as many as a system call takes
	views := [][]byte{nil}
	for i := range data {
		views = append(views, data[i:i+1], data[i:i])
	}
	w, err := s.Create(t.Context(), "x", vector(int64(len(data))))
	require.NoError(t, err)
	defer w.Abort()
	before := slices.Clone(views)
	require.NoError(t, w.WriteViews(t.Context(), 0, nil))
	require.NoError(t, w.WriteViews(t.Context(), 0, [][]byte{nil, {}}))
	require.NoError(t, w.WriteViews(t.Context(), 0, views))
	require.Equal(t, before, views, "the caller's views are the caller's")
	want := bytes.Clone(data)
	clear(data)
	_, err = w.Commit(t.Context())
	require.NoError(t, err)
	holds(t, s, "x", want, "the caller has overwritten its own since")
}

func unseen(t *testing.T, s store.Store) {
	for range 2 { // the second time over an older tensor of the name
		before, err := s.List(t.Context(), "", "", 10)
		require.NoError(t, err)
		w := begin(t, s, "x", 1, 2, 3)
		now, err := s.List(t.Context(), "", "", 10)
		require.NoError(t, err)
		require.Equal(t, before, now)
		if len(before) == 0 {
			_, err = s.Open(t.Context(), "x")
			require.ErrorIs(t, err, store.ErrNotFound)
		} else {
			require.Equal(t, []byte("old"), get(t, s, "x"))
		}
		w.Abort()
		w.Abort()
		now, err = s.List(t.Context(), "", "", 10)
		require.NoError(t, err)
		require.Equal(t, before, now)
		put(t, s, "x", []byte("old"))
	}
	w := begin(t, s, "x", []byte("new")...)
	_, err := w.Commit(t.Context())
	require.NoError(t, err)
	w.Abort()
	require.Equal(t, []byte("new"), get(t, s, "x"))
}

func lastStays(t *testing.T, s store.Store) {
	a := begin(t, s, "x", 9)
	b := begin(t, s, "x", 1, 2)
	_, err := b.Commit(t.Context())
	require.NoError(t, err)
	_, err = a.Commit(t.Context())
	require.NoError(t, err)
	require.Equal(t, []byte{9}, get(t, s, "x"))
	require.Equal(t, []string{"x"}, list(t, s, "", "", 10))
}

// What may happen to a tensor x while somebody reads it.
func replaced(t *testing.T, s store.Store) { put(t, s, "x", bytes.Repeat([]byte{0xee}, 3*mib)) }
func deleted(t *testing.T, s store.Store)  { remove(t, s, "x") }
func closed(t *testing.T, s store.Store)   { require.NoError(t, s.Close()) }

func replacedAndDeleted(t *testing.T, s store.Store) {
	put(t, s, "x", []byte{1})
	remove(t, s, "x")
}

func keeps(change func(t *testing.T, s store.Store)) func(t *testing.T, s store.Store) {
	return func(t *testing.T, s store.Store) {
		data := random(3*mib, 1)
		info := put(t, s, "x", data)
		r, err := s.Open(t.Context(), "x")
		require.NoError(t, err)
		early, heldEarly, err := r.View(t.Context(), 10, 1*mib)
		require.NoError(t, err)
		change(t, s)
		late, heldLate, err := r.View(t.Context(), 2*mib, 1*mib)
		require.NoError(t, err)
		require.Empty(t, cmp.Diff(info, r.Info()))
		r.Release() // the views outlive it
		require.True(t, bytes.Equal(data[10:10+1*mib], early), "a view from before")
		heldEarly.Release()
		require.True(t, bytes.Equal(data[2*mib:], late), "a view from after")
		heldLate.Release()
	}
}

func room(t *testing.T, s store.Store) {
	meter, ok := s.(store.Meter)
	if !ok {
		t.Skip("this store is no store.Meter")
	}
	now := func() int64 {
		used, limit := meter.Used()
		require.LessOrEqual(t, used, limit)
		return used
	}
	const size = 100_000
	require.Zero(t, now())
	put(t, s, "x", random(size, 1))
	one := now()
	require.GreaterOrEqual(t, one, int64(size))
	r, err := s.Open(t.Context(), "x")
	require.NoError(t, err)
	_, held, err := r.View(t.Context(), 0, 10)
	require.NoError(t, err)
	put(t, s, "x", random(size, 2))
	require.GreaterOrEqual(t, now(), one+size, "with the old one, which is read")
	held.Release()
	require.GreaterOrEqual(t, now(), one+size, "with the old one, which is open")
	r.Release()
	require.Equal(t, one, now())
	remove(t, s, "x")
	require.Zero(t, now())
	w, err := s.Create(t.Context(), "x", vector(size))
	require.NoError(t, err)
	require.Equal(t, one, now())
	w.Abort()
	require.Zero(t, now())
}

func refused(t *testing.T, s store.Store) {
	for name, tc := range map[string]struct {
		name string
		desc tensor.Desc
		want error
	}{
		"no name":              {"", vector(1), store.ErrName},
		"a long name":          {strings.Repeat("n", store.MaxName+1), vector(1), store.ErrName},
		"a control character":  {"a\nb", vector(1), store.ErrName},
		"no UTF-8":             {"\xff", vector(1), store.ErrName},
		"no data type":         {"x", tensor.Desc{}, tensor.ErrDataType},
		"a negative dimension": {"x", vector(-1), tensor.ErrShape},
		"more than 63 bits":    {"x", tensor.Desc{DType: tensor.Complex128, Shape: tensor.Shape{1 << 40, 1 << 40}}, tensor.ErrTooLarge},
	} {
		_, err := s.Create(t.Context(), tc.name, tc.desc)
		require.ErrorIs(t, err, tc.want, name)
	}
	_, err := s.Open(t.Context(), "x")
	require.ErrorIs(t, err, store.ErrNotFound)
	for _, glob := range []string{"[", "a[", "*[]", "\\"} {
		_, err = s.List(t.Context(), glob, "", 1)
		require.ErrorIs(t, err, store.ErrGlob, "%q", glob)
	}
	require.Empty(t, list(t, s, "", "", 10))
}

func manyDeleted(t *testing.T, s store.Store) {
	for _, name := range []string{"a", "b", "c", "d"} {
		put(t, s, name, []byte(name))
	}
	gone, err := s.Delete(t.Context())
	require.NoError(t, err)
	require.Empty(t, gone)
	gone, err = s.Delete(t.Context(), "c", "?", "a", "c")
	require.NoError(t, err)
	require.Equal(t, []string{"c", "a"}, gone)
	require.Equal(t, []byte("b"), get(t, s, "b"))
	remove(t, s, "d", "b")
	require.Empty(t, list(t, s, "", "", 10))
}

func outside(t *testing.T, s store.Store) {
	w := begin(t, s, "x", make([]byte, 10)...)
	for _, tc := range []struct{ off, n int64 }{{-1, 1}, {0, 11}, {10, 1}, {11, 0}, {1<<63 - 1, 1}, {-1 << 63, 1}} {
		require.ErrorIs(t, w.WriteViews(t.Context(), tc.off, [][]byte{make([]byte, tc.n)}), store.ErrRange, "%v", tc)
	}
	_, err := w.Commit(t.Context())
	require.NoError(t, err)
	r, err := s.Open(t.Context(), "x")
	require.NoError(t, err)
	defer r.Release()
	for _, tc := range []struct{ off, n int64 }{{-1, 1}, {0, -1}, {0, 11}, {10, 1}, {11, 0}, {1<<63 - 1, 1}, {1, 1<<63 - 1}} {
		_, _, err := r.View(t.Context(), tc.off, tc.n)
		require.ErrorIs(t, err, store.ErrRange, "%v", tc)
	}
	got, held, err := r.View(t.Context(), 10, 0)
	require.NoError(t, err)
	require.Empty(t, got)
	held.Release()
}

func closedSays(t *testing.T, s store.Store) {
	put(t, s, "x", []byte{1})
	w := begin(t, s, "y")
	require.NoError(t, s.Close())
	_, err := w.Commit(t.Context())
	require.ErrorIs(t, err, store.ErrClosed)
	_, err = s.Create(t.Context(), "z", vector(0))
	require.ErrorIs(t, err, store.ErrClosed)
	_, err = s.Open(t.Context(), "x")
	require.ErrorIs(t, err, store.ErrClosed)
	_, err = s.List(t.Context(), "", "", 1)
	require.ErrorIs(t, err, store.ErrClosed)
	_, err = s.Delete(t.Context(), "x")
	require.ErrorIs(t, err, store.ErrClosed)
	require.ErrorIs(t, s.Close(), store.ErrClosed)
}

// endedContext has each method either succeed, because it need not wait, or say why
// it did not.
func endedContext(t *testing.T, s store.Store) {
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(errStopped)
	why := func(err error) {
		t.Helper()
		if err != nil {
			require.ErrorIs(t, err, errStopped)
		}
	}
	put(t, s, "x", []byte("old"))
	w, err := s.Create(ended, "x", vector(3))
	why(err)
	if err == nil {
		w.Abort()
	}
	_, err = s.List(ended, "", "", 10)
	why(err)
	r, err := s.Open(ended, "x")
	why(err)
	if err != nil {
		r, err = s.Open(t.Context(), "x")
		require.NoError(t, err)
	}
	_, held, err := r.View(ended, 0, 1)
	why(err)
	if err == nil {
		held.Release()
	}
	r.Release()
	w, err = s.Create(t.Context(), "x", vector(3))
	require.NoError(t, err)
	defer w.Abort()
	err = w.WriteViews(ended, 0, [][]byte{[]byte("new")})
	why(err)
	if err == nil {
		_, err = w.Commit(ended)
		why(err)
	}
	want := "old"
	if err == nil {
		want = "new"
	}
	require.Equal(t, want, string(get(t, s, "x")))
	gone, err := s.Delete(ended, "x")
	why(err)
	if len(gone) == 0 {
		remove(t, s, "x")
	}
	require.Empty(t, list(t, s, "", "", 10))
}

func copied(t *testing.T, s store.Store) {
	d := vector(4)
	info, err := push(t.Context(), s, "x", d, make([]byte, 4), 4, nil)
	require.NoError(t, err)
	known, err := s.List(t.Context(), "", "", 1)
	require.NoError(t, err)
	r, err := s.Open(t.Context(), "x")
	require.NoError(t, err)
	defer r.Release()
	for _, shape := range []tensor.Shape{d.Shape, info.Shape, known[0].Shape, r.Info().Shape} {
		shape[0] = 99
	}
	require.Equal(t, vector(4), r.Info().Desc)
}

// listed holds a store to a model: a map of names.
func listed(t *testing.T, s store.Store) {
	text := rapid.StringOfN(rapid.RuneFrom([]rune("ab/*é")), 1, 4, -1)
	rapid.Check(t, func(t *rapid.T) {
		model := map[string]bool{}
		if left := list(t, s, "", "", 1<<20); len(left) > 0 {
			remove(t, s, left...)
		}
		for _, name := range rapid.SliceOfN(text, 0, 12).Draw(t, "names") {
			if model[name] && rapid.Bool().Draw(t, "delete") {
				remove(t, s, name)
				delete(model, name)
			} else {
				put(t, s, name, nil)
				model[name] = true
			}
		}
		glob := rapid.SampledFrom([]string{"", "*", "a*", "*/b", "?", "[ab]*", "[^a]", "*\\**"}).Draw(t, "glob")
		after := rapid.OneOf(rapid.Just(""), text).Draw(t, "after")
		most := rapid.IntRange(0, 6).Draw(t, "most")
		var want []string
		for name := range model {
			if ok, _ := path.Match(glob, name); (ok || glob == "") && name > after {
				want = append(want, name)
			}
		}
		slices.Sort(want)
		want = want[:min(most, len(want))]
		if got := list(t, s, glob, after, most); !slices.Equal(want, got) {
			t.Fatalf("list of %q after %q, at most %d: %q, want %q", glob, after, most, got, want)
		}
	})
}

// together lets writers, readers, listers and deleters meet on a few names. Whoever
// sees a tensor sees bytes that its digest names.
func together(t *testing.T, s store.Store) {
	names := []string{"a", "b", "c"}
	var wg sync.WaitGroup
	for id := range 4 {
		wg.Go(func() {
			for i := range 30 {
				data := bytes.Repeat([]byte{byte(id), byte(i)}, 500*(id+1))
				if _, err := push(t.Context(), s, names[(id+i)%len(names)], vector(int64(len(data))), data, len(data), nil); err != nil {
					t.Error(err)
				}
			}
		})
		wg.Go(func() {
			for i := range 100 {
				r, err := s.Open(t.Context(), names[i%len(names)])
				if err != nil {
					continue
				}
				if _, err := read(t.Context(), r, 700); err != nil {
					t.Error(err)
				}
				r.Release()
			}
		})
	}
	wg.Go(func() {
		for i := range 60 {
			_, _ = s.Delete(t.Context(), names[i%len(names)])
			_, _ = s.List(t.Context(), "", "", 10)
		}
	})
	wg.Wait()
	for _, name := range list(t, s, "", "", 10) {
		get(t, s, name)
	}
}

func setsOf(t *testing.T, s store.Store) store.Sets {
	t.Helper()
	sets, ok := s.(store.Sets)
	if !ok {
		t.Skip("this store is not a store.Sets")
	}
	return sets
}

func setCommitted(t *testing.T, s store.Store) {
	sets := setsOf(t, s)
	for _, old := range []string{"b", "c"} {
		put(t, s, old, []byte("old"))
	}
	reader, err := s.Open(t.Context(), "b")
	require.NoError(t, err)
	defer reader.Release()
	set := []store.Writer{begin(t, s, "c", 3), begin(t, s, "a", 1), begin(t, s, "b", 2, 2)}
	require.NoError(t, errorOf(sets.Ready(t.Context(), set[1])))
	require.NoError(t, errorOf(sets.Ready(t.Context(), set[1])), "again")
	require.Equal(t, []string{"b", "c"}, list(t, s, "", "", 10))
	require.Equal(t, []byte("old"), get(t, s, "c"))
	infos, err := sets.CommitAll(t.Context(), set)
	require.NoError(t, err)
	known, err := s.List(t.Context(), "", "", 10)
	require.NoError(t, err)
	require.Empty(t, cmp.Diff([]store.Info{infos[1], infos[2], infos[0]}, known))
	for _, w := range set {
		w.Abort()
	}
	for name, data := range map[string][]byte{"a": {1}, "b": {2, 2}, "c": {3}} {
		require.Equal(t, data, get(t, s, name))
	}
	got, err := read(t.Context(), reader, 2)
	require.NoError(t, err)
	require.Equal(t, "old", string(got))
	infos, err = sets.CommitAll(t.Context(), nil)
	require.NoError(t, err)
	require.Empty(t, infos)
	put(t, s, "a", []byte("again"))
	remove(t, s, "a", "b", "c")
	require.Empty(t, list(t, s, "", "", 10))
}

func setRefused(t *testing.T, s store.Store) {
	sets := setsOf(t, s)
	put(t, s, "a", []byte("old"))
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(errStopped)
	used := func() (n int64) {
		if m, ok := s.(store.Meter); ok {
			n, _ = m.Used()
		}
		return n
	}
	before := used()
	for name, tc := range map[string]struct {
		ctx  context.Context
		with func(set []store.Writer) []store.Writer
		want error
	}{
		"one has ended":   {t.Context(), func(set []store.Writer) []store.Writer { set[1].Abort(); return set }, nil},
		"not its own":     {t.Context(), func(set []store.Writer) []store.Writer { return append(set, nobody{}) }, nil},
		"a name twice":    {t.Context(), func(set []store.Writer) []store.Writer { return append(set, begin(t, s, "a", 9)) }, store.ErrName},
		"too many":        {t.Context(), func(set []store.Writer) []store.Writer { return slices.Repeat(set, store.MaxSet/2+1) }, store.ErrFull},
		"a context ended": {ended, func(set []store.Writer) []store.Writer { return set }, errStopped},
	} {
		set := tc.with([]store.Writer{begin(t, s, "a", 1), begin(t, s, "b", 2)})
		_, err := sets.CommitAll(tc.ctx, set)
		require.Error(t, err, name)
		if tc.want != nil {
			require.ErrorIs(t, err, tc.want, name)
		}
		require.Equal(t, []string{"a"}, list(t, s, "", "", 10), name)
		require.Equal(t, []byte("old"), get(t, s, "a"), name)
		require.Equal(t, before, used(), "%s: every Writer has ended", name)
	}
	require.Error(t, errorOf(sets.Ready(t.Context(), nobody{})))
	w := begin(t, s, "b", 2)
	require.NoError(t, s.Close())
	_, err := sets.CommitAll(t.Context(), []store.Writer{w})
	require.ErrorIs(t, err, store.ErrClosed)
}

// nobody is a Writer of no store.
type nobody struct{ store.Writer }

func (nobody) Abort() {}

func setsWhole(t *testing.T, s store.Store) {
	sets := setsOf(t, s)
	names := []string{"a", "b", "c", "d"}
	commit := func(n int) {
		var set []store.Writer
		for i, name := range names {
			w, err := s.Create(t.Context(), name, vector(int64(i+1)))
			if err != nil {
				t.Error(err)
				return
			}
			set = append(set, w)
			if err := w.WriteViews(t.Context(), 0, [][]byte{bytes.Repeat([]byte{byte(n)}, i+1)}); err != nil {
				t.Error(err)
			}
		}
		if _, err := sets.CommitAll(t.Context(), set); err != nil {
			t.Error(err)
		}
	}
	commit(0)
	var wg sync.WaitGroup
	ended := make(chan struct{})
	wg.Go(func() {
		defer close(ended)
		for n := range 40 {
			commit(n)
		}
	})
	for range 2 {
		wg.Go(func() {
			for over := false; !over; {
				select {
				case <-ended:
					over = true
				default:
				}
				var readers []store.Reader
				var infos []store.Info
				sets.Together(func() {
					for _, name := range names {
						r, err := s.Open(t.Context(), name)
						if err != nil {
							t.Error(err)
							return
						}
						readers = append(readers, r)
					}
					infos, _ = s.List(t.Context(), "", "", 10)
				})
				var seen []byte
				for i, r := range readers {
					got, err := read(t.Context(), r, 10)
					if err != nil {
						t.Error(err)
					}
					seen = append(seen, got[:min(1, len(got))]...)
					if i < len(infos) && infos[i].Digest != r.Info().Digest {
						t.Errorf("tensor %q was listed from another set", names[i])
					}
					r.Release()
				}
				if len(slices.Compact(seen)) != 1 {
					t.Errorf("parts of sets %d", seen)
				}
			}
		})
	}
	wg.Wait()
}

func errorOf(_ store.Info, err error) error { return err }
