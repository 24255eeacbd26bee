package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// stores opens one empty store of each kind, with room for what the suite does.
var stores = map[string]func(t testing.TB) Store{
	"memory": func(t testing.TB) Store { return closing(t, NewMemory(testkit.Pool(t), 256*mib)) },
	"folder": func(t testing.TB) Store { return closing(t, openFolder(t, t.TempDir(), FolderConfig{})) },
}

// forAll runs a test of what every store does.
func forAll(t *testing.T, test func(t *testing.T, s Store)) {
	for name, open := range stores {
		t.Run(name, func(t *testing.T) { test(t, open(t)) })
	}
}

func openFolder(t testing.TB, dir string, config FolderConfig) *Folder {
	t.Helper()
	f, err := OpenFolder(dir, config)
	require.NoError(t, err)
	return f
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
	w, err := s.Create(t.Context(), name, d)
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

func TestWhatIsPushedIsPulled(t *testing.T) {
	wide := make(tensor.Shape, tensor.MaxRank)
	for i := range wide {
		wide[i] = 1
	}
	wide[3], wide[30] = 3, 5
	forAll(t, func(t *testing.T, s Store) {
		var want []Info
		for _, dtype := range tensor.DataTypes() {
			for _, shape := range []tensor.Shape{nil, {0}, {1}, {7, 3}, {2, 0, 4}, wide} {
				d := tensor.Desc{DType: dtype, Shape: shape}
				size, err := d.Bytes()
				require.NoError(t, err)
				name := fmt.Sprintf("%v/%v", d, len(shape))
				data := testkit.Bytes(int(size), uint64(size)+1)
				info := push(t, s, name, d, data, max(int(size), 1), nil)
				var digest codec.Digester
				_, _ = digest.Write(data)
				require.Equal(t, Info{Name: name, Desc: d, Digest: digest.Sum(), Stored: info.Stored, Durable: info.Durable}, info)
				require.False(t, info.Stored.IsZero())
				require.Equal(t, len(data), len(get(t, s, name)))
				require.True(t, bytes.Equal(data, get(t, s, name)))
				r, err := s.Open(t.Context(), name)
				require.NoError(t, err)
				require.Empty(t, cmp.Diff(info, r.Info()))
				r.Release()
				want = append(want, info)
			}
		}
		slices.SortFunc(want, func(a, b Info) int { return strings.Compare(a.Name, b.Name) })
		got, err := s.List(t.Context(), "", "", len(want)+1)
		require.NoError(t, err)
		require.Empty(t, cmp.Diff(want, got))
	})
}

func TestChunksMayComeInAnyOrder(t *testing.T) {
	rand := testkit.Rand(t)
	forAll(t, func(t *testing.T, s Store) {
		for _, chunk := range []int{1000, 16384, 65536} {
			for _, size := range []int{0, 1, chunk - 1, chunk, chunk + 1, 2 * chunk, 2*chunk + 1, 16383, 16384, 16385, hashPiece + 1, 9*mib + 5} {
				data := testkit.Bytes(size, 7)
				for name, order := range map[string]func([]int){
					"in order":       nil,
					"backwards":      slices.Reverse[[]int],
					"the last first": func(at []int) { slices.Sort(at[1:]); slices.Reverse(at); slices.Sort(at[min(1, len(at)):]) },
					"in any order":   func(at []int) { rand.Shuffle(len(at), func(i, j int) { at[i], at[j] = at[j], at[i] }) },
				} {
					if size == 0 && order != nil {
						continue
					}
					push(t, s, name, vector(int64(size)), data, chunk, order)
					require.True(t, bytes.Equal(data, get(t, s, name)), "%d bytes %s in chunks of %d", size, name, chunk)
				}
			}
		}
	})
}

func TestManyAndEmptyViewsAreWritten(t *testing.T) {
	forAll(t, func(t *testing.T, s Store) {
		data := testkit.Bytes(3*maxViews+1, 3)
		views := [][]byte{nil}
		for i := range data {
			views = append(views, data[i:i+1], data[i:i])
		}
		w, err := s.Create(t.Context(), "x", vector(int64(len(data))))
		require.NoError(t, err)
		before := slices.Clone(views)
		require.NoError(t, w.WriteViews(t.Context(), 0, nil))
		require.NoError(t, w.WriteViews(t.Context(), 0, [][]byte{nil, {}}))
		require.NoError(t, w.WriteViews(t.Context(), 0, views))
		require.Equal(t, before, views, "the caller's views are the caller's")
		_, err = w.Commit(t.Context())
		require.NoError(t, err)
		require.Equal(t, data, get(t, s, "x"))
	})
}

func TestNothingIsSeenBeforeCommitNorAfterAbort(t *testing.T) {
	forAll(t, func(t *testing.T, s Store) {
		for range 2 { // the second time over an older tensor of the name
			before, err := s.List(t.Context(), "", "", 10)
			require.NoError(t, err)
			w, err := s.Create(t.Context(), "x", vector(3))
			require.NoError(t, err)
			require.NoError(t, w.WriteViews(t.Context(), 0, [][]byte{{1, 2, 3}}))
			now, err := s.List(t.Context(), "", "", 10)
			require.NoError(t, err)
			require.Equal(t, before, now)
			if len(before) == 0 {
				_, err = s.Open(t.Context(), "x")
				require.ErrorIs(t, err, ErrNotFound)
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
		w, err := s.Create(t.Context(), "x", vector(3))
		require.NoError(t, err)
		require.NoError(t, w.WriteViews(t.Context(), 0, [][]byte{[]byte("new")}))
		_, err = w.Commit(t.Context())
		require.NoError(t, err)
		w.Abort()
		require.Equal(t, []byte("new"), get(t, s, "x"))
	})
}

func TestTheLastOneToCommitStays(t *testing.T) {
	forAll(t, func(t *testing.T, s Store) {
		a, err := s.Create(t.Context(), "x", vector(1))
		require.NoError(t, err)
		b, err := s.Create(t.Context(), "x", vector(2))
		require.NoError(t, err)
		require.NoError(t, b.WriteViews(t.Context(), 0, [][]byte{{1, 2}}))
		require.NoError(t, a.WriteViews(t.Context(), 0, [][]byte{{9}}))
		_, err = b.Commit(t.Context())
		require.NoError(t, err)
		_, err = a.Commit(t.Context())
		require.NoError(t, err)
		require.Equal(t, []byte{9}, get(t, s, "x"))
		infos, err := s.List(t.Context(), "", "", 10)
		require.NoError(t, err)
		require.Len(t, infos, 1)
	})
}

func TestAReaderKeepsWhatItOpened(t *testing.T) {
	data := testkit.Bytes(3*mib, 1)
	for name, change := range map[string]func(t *testing.T, s Store){
		"replaced": func(t *testing.T, s Store) { put(t, s, "x", bytes.Repeat([]byte{0xee}, len(data))) },
		"deleted":  func(t *testing.T, s Store) { remove(t, s, "x") },
		"replaced and deleted": func(t *testing.T, s Store) {
			put(t, s, "x", []byte{1})
			remove(t, s, "x")
		},
		"the store closed": func(t *testing.T, s Store) { require.NoError(t, s.Close()) },
	} {
		t.Run(name, func(t *testing.T) {
			forAll(t, func(t *testing.T, s Store) {
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
				require.True(t, bytes.Equal(data[10:10+1*mib], early))
				heldEarly.Release()
				require.True(t, bytes.Equal(data[2*mib:], late))
				heldLate.Release()
			})
		})
	}
}

func TestRoomComesBackWhenTheLastReaderIsDone(t *testing.T) {
	forAll(t, func(t *testing.T, s Store) {
		now := func() int64 {
			n, _ := s.(Meter).Used()
			return n
		}
		require.Zero(t, now())
		put(t, s, "x", make([]byte, 100_000))
		one := now()
		require.GreaterOrEqual(t, one, int64(100_000))
		r, err := s.Open(t.Context(), "x")
		require.NoError(t, err)
		_, held, err := r.View(t.Context(), 0, 10)
		require.NoError(t, err)
		put(t, s, "x", make([]byte, 100_000))
		require.Equal(t, 2*one, now())
		if _, copied := s.(*Folder); copied { // a view of a folder holds the copy alone
			held.Release()
			require.Equal(t, 2*one, now())
			r.Release()
		} else {
			r.Release()
			require.Equal(t, 2*one, now())
			held.Release()
		}
		require.Equal(t, one, now())
		remove(t, s, "x")
		require.Zero(t, now())
		w, err := s.Create(t.Context(), "x", vector(100_000))
		require.NoError(t, err)
		require.Equal(t, one, now())
		w.Abort()
		require.Zero(t, now())
	})
}

func TestWhatCannotBeIsRefused(t *testing.T) {
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(errStopped)
	forAll(t, func(t *testing.T, s Store) {
		for name, tc := range map[string]struct {
			ctx  context.Context
			name string
			desc tensor.Desc
			want error
		}{
			"no name":              {t.Context(), "", vector(1), ErrName},
			"a long name":          {t.Context(), strings.Repeat("n", MaxName+1), vector(1), ErrName},
			"a control character":  {t.Context(), "a\nb", vector(1), ErrName},
			"no UTF-8":             {t.Context(), "\xff", vector(1), ErrName},
			"no data type":         {t.Context(), "x", tensor.Desc{}, tensor.ErrDataType},
			"a negative dimension": {t.Context(), "x", vector(-1), tensor.ErrShape},
			"more than 63 bits":    {t.Context(), "x", tensor.Desc{DType: tensor.Complex128, Shape: tensor.Shape{1 << 40, 1 << 40}}, tensor.ErrTooLarge},
			"a context that ended": {ended, "x", vector(1), errStopped},
		} {
			_, err := s.Create(tc.ctx, tc.name, tc.desc)
			require.ErrorIs(t, err, tc.want, name)
		}
		_, err := s.Open(t.Context(), "x")
		require.ErrorIs(t, err, ErrNotFound)
		deleted, err := s.Delete(t.Context(), "x")
		require.NoError(t, err)
		require.Empty(t, deleted)
		for _, glob := range []string{"[", "a[", "*[]", "\\"} {
			_, err = s.List(t.Context(), glob, "", 1)
			require.ErrorIs(t, err, ErrGlob, "%q", glob)
		}
	})
}

func TestManyAreDeletedAtATime(t *testing.T) {
	forAll(t, func(t *testing.T, s Store) {
		for _, name := range []string{"a", "b", "c", "d"} {
			put(t, s, name, []byte(name))
		}
		deleted, err := s.Delete(t.Context())
		require.NoError(t, err)
		require.Empty(t, deleted)
		deleted, err = s.Delete(t.Context(), "c", "?", "a", "c")
		require.NoError(t, err)
		require.Equal(t, []string{"c", "a"}, deleted)
		ended, cancel := context.WithCancelCause(t.Context())
		cancel(errStopped)
		deleted, err = s.Delete(ended, "b", "d")
		require.ErrorIs(t, err, errStopped)
		require.Empty(t, deleted)
		require.Equal(t, []byte("b"), get(t, s, "b"))
		remove(t, s, "d", "b")
		require.Empty(t, must(s.List(t.Context(), "", "", 10)))
	})
}

func TestBytesOutsideATensorAreNeitherWrittenNorRead(t *testing.T) {
	forAll(t, func(t *testing.T, s Store) {
		w, err := s.Create(t.Context(), "x", vector(10))
		require.NoError(t, err)
		defer w.Abort()
		require.NoError(t, w.WriteViews(t.Context(), 0, [][]byte{make([]byte, 10)}))
		for _, tc := range []struct{ off, n int64 }{{-1, 1}, {0, 11}, {10, 1}, {11, 0}, {1<<63 - 1, 1}, {-1 << 63, 1}} {
			require.ErrorIs(t, w.WriteViews(t.Context(), tc.off, [][]byte{make([]byte, tc.n)}), ErrRange, "%v", tc)
		}
		_, err = w.Commit(t.Context())
		require.NoError(t, err)
		r, err := s.Open(t.Context(), "x")
		require.NoError(t, err)
		defer r.Release()
		for _, tc := range []struct{ off, n int64 }{{-1, 1}, {0, -1}, {0, 11}, {10, 1}, {11, 0}, {1<<63 - 1, 1}, {1, 1<<63 - 1}} {
			_, _, err := r.View(t.Context(), tc.off, tc.n)
			require.ErrorIs(t, err, ErrRange, "%v", tc)
		}
		got, held, err := r.View(t.Context(), 10, 0)
		require.NoError(t, err)
		require.Empty(t, got)
		held.Release()
	})
}

func TestAClosedStoreSaysSo(t *testing.T) {
	forAll(t, func(t *testing.T, s Store) {
		put(t, s, "x", []byte{1})
		w, err := s.Create(t.Context(), "y", vector(0))
		require.NoError(t, err)
		require.NoError(t, s.Close())
		_, err = w.Commit(t.Context())
		require.ErrorIs(t, err, ErrClosed)
		_, err = s.Create(t.Context(), "z", vector(0))
		require.ErrorIs(t, err, ErrClosed)
		_, err = s.Open(t.Context(), "x")
		require.ErrorIs(t, err, ErrClosed)
		_, err = s.List(t.Context(), "", "", 1)
		require.ErrorIs(t, err, ErrClosed)
		_, err = s.Delete(t.Context(), "x")
		require.ErrorIs(t, err, ErrClosed)
		require.ErrorIs(t, s.Close(), ErrClosed)
	})
}

func TestAnInfoIsACopy(t *testing.T) {
	forAll(t, func(t *testing.T, s Store) {
		d := vector(4)
		info := push(t, s, "x", d, make([]byte, 4), 4, nil)
		listed, err := s.List(t.Context(), "", "", 1)
		require.NoError(t, err)
		r, err := s.Open(t.Context(), "x")
		require.NoError(t, err)
		defer r.Release()
		for _, shape := range []tensor.Shape{d.Shape, info.Shape, listed[0].Shape, r.Info().Shape} {
			shape[0] = 99
		}
		require.Equal(t, vector(4), r.Info().Desc)
	})
}

// TestAListIsWhatASortedSliceGives holds both stores to a model: a map of names.
func TestAListIsWhatASortedSliceGives(t *testing.T) {
	text := rapid.StringOfN(rapid.RuneFrom([]rune("ab/*é")), 1, 4, -1)
	forAll(t, func(t *testing.T, s Store) {
		rapid.Check(t, func(t *rapid.T) {
			model := map[string]bool{}
			for _, info := range must(s.List(t.Context(), "", "", 1<<20)) {
				remove(t, s, info.Name)
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
			var want, got []string
			for name := range model {
				if ok, _ := path.Match(glob, name); (ok || glob == "") && name > after {
					want = append(want, name)
				}
			}
			slices.Sort(want)
			want = want[:min(most, len(want))]
			for _, info := range must(s.List(t.Context(), glob, after, most)) {
				got = append(got, info.Name)
			}
			if !slices.Equal(want, got) {
				t.Fatalf("list of %q after %q, at most %d: %q, want %q", glob, after, most, got, want)
			}
		})
	})
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func TestAListIsLongerThanAPage(t *testing.T) {
	s := stores["memory"](t)
	for i := range 2*listPage + 1 {
		put(t, s, fmt.Sprintf("%05d", i), nil)
	}
	require.Len(t, must(s.List(t.Context(), "", "", 1<<20)), 2*listPage+1)
	require.Len(t, must(s.List(t.Context(), "*7", "", 1<<20)), 204+1)
	require.Equal(t, "02048", must(s.List(t.Context(), "*8", "02039", 1))[0].Name)
}

// TestManyAtOnceSeeOnlyWholeTensors lets writers, readers, listers and deleters meet
// on a few names. Whoever sees a tensor sees bytes that its digest names.
func TestManyAtOnceSeeOnlyWholeTensors(t *testing.T) {
	forAll(t, func(t *testing.T, s Store) {
		names := []string{"a", "b", "c"}
		var wg sync.WaitGroup
		for id := range 4 {
			wg.Go(func() {
				for i := range 30 {
					name := names[(id+i)%len(names)]
					put(t, s, name, bytes.Repeat([]byte{byte(id), byte(i)}, 500*(id+1)))
				}
			})
			wg.Go(func() {
				for i := range 100 {
					r, err := s.Open(t.Context(), names[i%len(names)])
					if err != nil {
						continue
					}
					got := read(t, r, 700)
					var d codec.Digester
					_, _ = d.Write(got)
					if d.Sum() != r.Info().Digest {
						t.Errorf("%v: bytes of another tensor", r.Info().Name)
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
		for _, info := range must(s.List(t.Context(), "", "", 10)) {
			get(t, s, info.Name)
		}
	})
}
