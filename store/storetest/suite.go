package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"sync"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

func (s suite) pulled() {
	wide := slices.Repeat(tensor.Shape{1}, tensor.MaxRank)
	wide[3], wide[30] = 3, 5
	var want []store.Info
	for _, dtype := range tensor.DataTypes() {
		for _, shape := range []tensor.Shape{nil, {0}, {1}, {7, 3}, {2, 0, 4}, wide} {
			d := tensor.Desc{DType: dtype, Shape: shape}
			size, err := d.Bytes()
			require.NoError(s, err)
			name := fmt.Sprintf("%v/%v", d, len(shape))
			data := random(int(size), uint64(size)+1)
			info, err := s.push(name, d, data, max(int(size), 1), nil)
			require.NoError(s, err)
			require.Equal(s, store.Info{Name: name, Desc: d, Digest: digestOf(data), Stored: info.Stored, Durable: info.Durable}, info)
			require.False(s, info.Stored.IsZero())
			s.holds(name, data, "pushed in one piece")
			r := s.open(name)
			require.Empty(s, cmp.Diff(info, r.Info()))
			r.Release()
			want = append(want, info)
		}
	}
	slices.SortFunc(want, func(a, b store.Info) int { return strings.Compare(a.Name, b.Name) })
	got, _ := s.list("", "", len(want)+1)
	require.Empty(s, cmp.Diff(want, got))
}

func (s suite) anyOrder() {
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
				_, err := s.push(name, Vector(int64(size)), data, chunk, order)
				require.NoError(s, err)
				s.holds(name, data, fmt.Sprintf("%d bytes %s in chunks of %d", size, name, chunk))
			}
		}
	}
}

func (s suite) manyViews() {
	data := random(3*1024+1, 3) // three times as many as a system call takes
	views := [][]byte{nil}
	for i := range data {
		views = append(views, data[i:i+1], data[i:i])
	}
	w, err := s.Create(s.Context(), "x", Vector(int64(len(data))), nil)
	require.NoError(s, err)
	defer w.Abort()
	before := slices.Clone(views)
	for _, some := range [][][]byte{nil, {nil, {}}, views} {
		require.NoError(s, s.write(w, 0, some...))
	}
	require.Equal(s, before, views, "the caller's views are the caller's")
	want := bytes.Clone(data)
	clear(data)
	_, err = w.Commit(s.Context())
	require.NoError(s, err)
	s.holds("x", want, "the caller has overwritten its own since")
}

func (s suite) unseen() {
	for again := range 2 { // the second time over an older tensor of the name
		before, _ := s.list("", "", 10)
		unchanged := func() {
			now, _ := s.list("", "", 10)
			require.Equal(s, before, now)
		}
		w := s.begin("x", 1, 2, 3)
		unchanged()
		if again == 0 {
			_, err := s.Open(s.Context(), "x")
			require.ErrorIs(s, err, store.ErrNotFound)
		} else {
			require.Equal(s, []byte("old"), s.get("x"))
		}
		w.Abort()
		w.Abort()
		unchanged()
		s.put("x", []byte("old"))
	}
	w := s.begin("x", []byte("new")...)
	_, err := w.Commit(s.Context())
	require.NoError(s, err)
	w.Abort()
	require.Equal(s, []byte("new"), s.get("x"))
}

func (s suite) lastStays() {
	a, b := s.begin("x", 9), s.begin("x", 1, 2)
	for _, w := range []store.Writer{b, a} {
		_, err := w.Commit(s.Context())
		require.NoError(s, err)
	}
	require.Equal(s, []byte{9}, s.get("x"))
	require.Equal(s, []string{"x"}, s.names())
}

func (s suite) replace() { s.put("x", bytes.Repeat([]byte{0xee}, 3*mib)) }

// keeps returns a test of what somebody reads of a tensor x while change happens to it.
func keeps(change func(s suite)) func(s suite) {
	return func(s suite) {
		data := random(3*mib, 1)
		info := s.put("x", data)
		r := s.open("x")
		early, heldEarly, err := r.View(s.Context(), 10, 1*mib)
		require.NoError(s, err)
		change(s)
		late, heldLate, err := r.View(s.Context(), 2*mib, 1*mib)
		require.NoError(s, err)
		require.Empty(s, cmp.Diff(info, r.Info()))
		r.Release() // the views outlive it
		require.True(s, bytes.Equal(data[10:10+1*mib], early), "a view from before")
		heldEarly.Release()
		require.True(s, bytes.Equal(data[2*mib:], late), "a view from after")
		heldLate.Release()
	}
}

func (s suite) room() {
	meter, ok := s.Store.(store.Meter)
	if !ok {
		s.Skip("this store is no store.Meter")
	}
	now := func() int64 {
		used, limit := meter.Used()
		require.LessOrEqual(s, used, limit)
		return used
	}
	const size = 100_000
	require.Zero(s, now())
	s.put("x", random(size, 1))
	one := now()
	require.GreaterOrEqual(s, one, int64(size))
	r := s.open("x")
	_, held, err := r.View(s.Context(), 0, 10)
	require.NoError(s, err)
	s.put("x", random(size, 2))
	require.GreaterOrEqual(s, now(), one+size, "with the old one, which is read")
	held.Release()
	require.GreaterOrEqual(s, now(), one+size, "with the old one, which is open")
	r.Release()
	require.Equal(s, one, now())
	s.remove("x")
	require.Zero(s, now())
	w, err := s.Create(s.Context(), "x", Vector(size), nil)
	require.NoError(s, err)
	require.Equal(s, one, now())
	w.Abort()
	require.Zero(s, now())
}

func (s suite) refused() {
	for name, tc := range map[string]struct {
		name string
		desc tensor.Desc
		want error
	}{
		"no name":              {"", Vector(1), store.ErrName},
		"a long name":          {strings.Repeat("n", store.MaxName+1), Vector(1), store.ErrName},
		"a control character":  {"a\nb", Vector(1), store.ErrName},
		"no UTF-8":             {"\xff", Vector(1), store.ErrName},
		"a prefix":             {"a/", Vector(1), store.ErrName},
		"a reserved name":      {"__metadata__", Vector(1), store.ErrName},
		"broken text":          {"a\ufffd", Vector(1), store.ErrName},
		"no data type":         {"x", tensor.Desc{}, tensor.ErrDataType},
		"a negative dimension": {"x", Vector(-1), tensor.ErrShape},
		"more than 63 bits":    {"x", tensor.Desc{DType: tensor.Complex128, Shape: tensor.Shape{1 << 40, 1 << 40}}, tensor.ErrTooLarge},
	} {
		_, err := s.Create(s.Context(), tc.name, tc.desc, nil)
		require.ErrorIs(s, err, tc.want, name)
	}
	_, err := s.Open(s.Context(), "x")
	require.ErrorIs(s, err, store.ErrNotFound)
	for _, glob := range []string{"[", "a[", "*[]", "\\"} {
		_, err = s.List(s.Context(), glob, "", 1)
		require.ErrorIs(s, err, store.ErrGlob, "%q", glob)
	}
	require.Empty(s, s.names())
}

func (s suite) manyDeleted() {
	for _, name := range []string{"a", "b", "c", "d"} {
		s.put(name, []byte(name))
	}
	gone, err := s.Delete(s.Context())
	require.NoError(s, err)
	require.Empty(s, gone)
	gone, err = s.Delete(s.Context(), "c", "?", "a", "c")
	require.NoError(s, err)
	require.Equal(s, []string{"c", "a"}, gone)
	require.Equal(s, []byte("b"), s.get("b"))
	s.remove("d", "b")
	require.Empty(s, s.names())
}

func (s suite) outside() {
	w := s.begin("x", make([]byte, 10)...)
	for _, tc := range []struct{ off, n int64 }{{-1, 1}, {0, 11}, {10, 1}, {11, 0}, {1<<63 - 1, 1}, {-1 << 63, 1}} {
		require.ErrorIs(s, s.write(w, tc.off, make([]byte, tc.n)), store.ErrRange, "%v", tc)
	}
	_, err := w.Commit(s.Context())
	require.NoError(s, err)
	r := s.open("x")
	defer r.Release()
	for _, tc := range []struct{ off, n int64 }{{-1, 1}, {0, -1}, {0, 11}, {10, 1}, {11, 0}, {1<<63 - 1, 1}, {1, 1<<63 - 1}} {
		_, _, err := r.View(s.Context(), tc.off, tc.n)
		require.ErrorIs(s, err, store.ErrRange, "%v", tc)
	}
	got, held, err := r.View(s.Context(), 10, 0)
	require.NoError(s, err)
	require.Empty(s, got)
	held.Release()
}

func (s suite) closedSays() {
	s.put("x", []byte{1})
	w := s.begin("y")
	require.NoError(s, s.Close())
	_, err := w.Commit(s.Context())
	require.ErrorIs(s, err, store.ErrClosed)
	_, err = s.Create(s.Context(), "z", Vector(0), nil)
	require.ErrorIs(s, err, store.ErrClosed)
	_, err = s.Open(s.Context(), "x")
	require.ErrorIs(s, err, store.ErrClosed)
	_, err = s.List(s.Context(), "", "", 1)
	require.ErrorIs(s, err, store.ErrClosed)
	_, err = s.Delete(s.Context(), "x")
	require.ErrorIs(s, err, store.ErrClosed)
	require.ErrorIs(s, s.Close(), store.ErrClosed)
}

// ended returns a context that has ended.
func (s suite) ended() context.Context {
	ctx, cancel := context.WithCancelCause(s.Context())
	cancel(errStopped)
	return ctx
}

// endedContext has each method either succeed, because it need not wait, or say why
// it did not.
func (s suite) endedContext() {
	ended := s.ended()
	done := func(err error) bool {
		s.Helper()
		if err != nil {
			require.ErrorIs(s, err, errStopped)
		}
		return err == nil
	}
	s.put("x", []byte("old"))
	w, err := s.Create(ended, "x", Vector(3), nil)
	if done(err) {
		w.Abort()
	}
	_, err = s.List(ended, "", "", 10)
	done(err)
	r, err := s.Open(ended, "x")
	if !done(err) {
		r = s.open("x")
	}
	if _, held, err := r.View(ended, 0, 1); done(err) {
		held.Release()
	}
	r.Release()
	w, err = s.Create(s.Context(), "x", Vector(3), nil)
	require.NoError(s, err)
	defer w.Abort()
	want := "old"
	if done(w.WriteViews(ended, 0, [][]byte{[]byte("new")})) {
		if _, err = w.Commit(ended); done(err) {
			want = "new"
		}
	}
	require.Equal(s, want, string(s.get("x")))
	gone, err := s.Delete(ended, "x")
	done(err)
	if len(gone) == 0 {
		s.remove("x")
	}
	require.Empty(s, s.names())
}

func (s suite) copied() {
	d := Vector(4)
	info, err := s.push("x", d, make([]byte, 4), 4, nil)
	require.NoError(s, err)
	r := s.open("x")
	defer r.Release()
	known, _ := s.list("", "", 1)
	for _, shape := range []tensor.Shape{d.Shape, info.Shape, known[0].Shape, r.Info().Shape} {
		shape[0] = 99
	}
	require.Equal(s, Vector(4), r.Info().Desc)
}

func (s suite) metadata() {
	given := map[string]string{"unit": "m/s", "100%": "50 % \ufffd\n", "": ""}
	want := maps.Clone(given)
	w, err := s.Create(s.Context(), "x", Vector(1), given)
	require.NoError(s, err)
	defer w.Abort()
	given["unit"] = "furlongs"
	require.NoError(s, s.write(w, 0, []byte{1}))
	info, err := w.Commit(s.Context())
	require.NoError(s, err)
	r := s.open("x")
	defer r.Release()
	known, _ := s.list("", "", 1)
	for _, got := range []map[string]string{info.Metadata, known[0].Metadata, r.Info().Metadata} {
		require.Equal(s, want, got)
	}
	require.Nil(s, s.put("x", nil).Metadata, "it belongs to the older one")
	for why, metadata := range map[string]map[string]string{
		"it is too long":       {"k": strings.Repeat("v", store.MaxMetadata)},
		"a key of the store's": {"tensorferry.name": "y"},
		"it is not UTF-8":      {"k": "\xff"},
	} {
		_, err = s.Create(s.Context(), "y", Vector(1), metadata)
		require.ErrorIs(s, err, store.ErrMetadata, why)
	}
}

// listed holds a store to a model: a map of names.
func (s suite) listed() {
	text := rapid.StringOfN(rapid.RuneFrom([]rune("ab/*é")), 1, 4, -1)
	rapid.Check(s.T, func(t *rapid.T) {
		s := suite{t, s.Store, s.inPlace}
		model := map[string]bool{}
		if left := s.names(); len(left) > 0 {
			s.remove(left...)
		}
		for _, name := range rapid.SliceOfN(text.Filter(func(name string) bool { return store.CheckNew(name) == nil }), 0, 12).Draw(t, "names") {
			if model[name] && rapid.Bool().Draw(t, "delete") {
				s.remove(name)
				delete(model, name)
			} else {
				s.put(name, nil)
				model[name] = true
			}
		}
		glob := rapid.SampledFrom([]string{"", "*", "a*", "a/?*", "*/b", "?", "[ab]*", "[^a]", "*\\**"}).Draw(t, "glob")
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
		if _, got := s.list(glob, after, most); !slices.Equal(want, got) {
			t.Fatalf("list of %q after %q, at most %d: %q, want %q", glob, after, most, got, want)
		}
	})
}

// together lets writers, readers, listers and deleters meet on a few names. Whoever
// sees a tensor sees bytes that its digest names.
func (s suite) together() {
	names := []string{"a", "b", "c"}
	var wg sync.WaitGroup
	for id := range 4 {
		wg.Go(func() {
			for i := range 30 {
				data := bytes.Repeat([]byte{byte(id), byte(i)}, 500*(id+1))
				if _, err := s.push(names[(id+i)%len(names)], Vector(int64(len(data))), data, len(data), nil); err != nil {
					s.Error(err)
				}
			}
		})
		wg.Go(func() {
			for i := range 100 {
				r, err := s.Open(s.Context(), names[i%len(names)])
				if err != nil {
					continue
				}
				if _, err := Read(s.Context(), r, 700); err != nil {
					s.Error(err)
				}
				r.Release()
			}
		})
	}
	wg.Go(func() {
		for i := range 60 {
			_, _ = s.Delete(s.Context(), names[i%len(names)])
			_, _ = s.List(s.Context(), "", "", 10)
		}
	})
	wg.Wait()
	for _, name := range s.names() {
		s.get(name)
	}
}

func (s suite) sets() store.Sets {
	sets, ok := s.Store.(store.Sets)
	if !ok {
		s.Skip("this store is not a store.Sets")
	}
	return sets
}

func (s suite) setCommitted() {
	sets := s.sets()
	for _, old := range []string{"b", "c"} {
		s.put(old, []byte("old"))
	}
	reader := s.open("b")
	defer reader.Release()
	set := []store.Writer{s.begin("c", 3), s.begin("a", 1), s.begin("b", 2, 2)}
	for range 2 {
		_, err := sets.Ready(s.Context(), set[1])
		require.NoError(s, err)
	}
	require.Equal(s, []string{"b", "c"}, s.names())
	require.Equal(s, []byte("old"), s.get("c"))
	infos, err := sets.CommitAll(s.Context(), set)
	require.NoError(s, err)
	known, _ := s.list("", "", 10)
	require.Empty(s, cmp.Diff([]store.Info{infos[1], infos[2], infos[0]}, known))
	for _, w := range set {
		w.Abort()
	}
	for name, data := range map[string][]byte{"a": {1}, "b": {2, 2}, "c": {3}} {
		require.Equal(s, data, s.get(name))
	}
	got, err := Read(s.Context(), reader, 2)
	require.NoError(s, err)
	require.Equal(s, "old", string(got))
	infos, err = sets.CommitAll(s.Context(), nil)
	require.NoError(s, err)
	require.Empty(s, infos)
	s.put("a", []byte("again"))
	s.remove("a", "b", "c")
	require.Empty(s, s.names())
}

func (s suite) setRefused() {
	sets := s.sets()
	s.put("a", []byte("old"))
	used := func() (n int64) {
		if m, ok := s.Store.(store.Meter); ok {
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
		"one has ended":   {s.Context(), func(set []store.Writer) []store.Writer { set[1].Abort(); return set }, nil},
		"not its own":     {s.Context(), func(set []store.Writer) []store.Writer { return append(set, nobody{}) }, nil},
		"a name twice":    {s.Context(), func(set []store.Writer) []store.Writer { return append(set, s.begin("a", 9)) }, store.ErrName},
		"too many":        {s.Context(), func(set []store.Writer) []store.Writer { return slices.Repeat(set, store.MaxSet/2+1) }, store.ErrFull},
		"a context ended": {s.ended(), func(set []store.Writer) []store.Writer { return set }, errStopped},
	} {
		set := tc.with([]store.Writer{s.begin("a", 1), s.begin("b", 2)})
		_, err := sets.CommitAll(tc.ctx, set)
		require.Error(s, err, name)
		if tc.want != nil {
			require.ErrorIs(s, err, tc.want, name)
		}
		require.Equal(s, []string{"a"}, s.names(), name)
		require.Equal(s, []byte("old"), s.get("a"), name)
		require.Equal(s, before, used(), "%s: every Writer has ended", name)
	}
	_, err := sets.Ready(s.Context(), nobody{})
	require.Error(s, err)
	w := s.begin("b", 2)
	require.NoError(s, s.Close())
	_, err = sets.CommitAll(s.Context(), []store.Writer{w})
	require.ErrorIs(s, err, store.ErrClosed)
}

// nobody is a Writer of no store.
type nobody struct{ store.Writer }

func (nobody) Abort() {}

func (s suite) setsWhole() {
	sets := s.sets()
	names := []string{"a", "b", "c", "d"}
	commit := func(n int) error {
		var set []store.Writer
		for i, name := range names {
			w, err := s.Create(s.Context(), name, Vector(int64(i+1)), nil)
			if err != nil {
				return err
			}
			set = append(set, w)
			if err := s.write(w, 0, bytes.Repeat([]byte{byte(n)}, i+1)); err != nil {
				return err
			}
		}
		_, err := sets.CommitAll(s.Context(), set)
		return err
	}
	require.NoError(s, commit(0))
	ctx, end := context.WithCancel(s.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		defer end()
		for n := range 40 {
			if err := commit(n); err != nil {
				s.Error(err)
			}
		}
	})
	for range 2 {
		wg.Go(func() {
			for over := false; !over; {
				over = ctx.Err() != nil // then once more
				if err := s.oneSet(sets, names); err != nil {
					s.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

// oneSet opens and lists tensors until no set was committed meanwhile, and returns an error
// unless they are of one set.
func (s suite) oneSet(sets store.Sets, names []string) error {
	var seen []byte
	for changed := names; len(changed) > 0; {
		seen = nil
		_, before, _ := sets.Changed(math.MaxInt64)
		infos, err := s.List(s.Context(), "", "", 10)
		for i, name := range names {
			r, e := s.Open(s.Context(), name)
			if err = errors.Join(err, e); err != nil {
				return err
			}
			got, err := Read(s.Context(), r, 10)
			if err != nil {
				return err
			}
			seen = append(seen, got[0])
			if i < len(infos) && infos[i].Digest != r.Info().Digest {
				seen = append(seen, 255) // it was listed from another set
			}
			r.Release()
		}
		var known bool
		if changed, _, known = sets.Changed(before); !known {
			return errors.New("the names of the last sets are not known")
		}
	}
	if len(slices.Compact(seen)) != 1 {
		return fmt.Errorf("parts of sets %d", seen)
	}
	return nil
}
