package store_test

import (
	"fmt"
	"iter"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/memory"
	"github.com/tensorferry/tensorferry/store/storetest"
)

// collect returns what seq yields, and the error that it ends with.
func collect[T any](seq iter.Seq2[T, error]) (all []T, err error) {
	for v, e := range seq {
		if e != nil {
			err = e
			continue
		}
		all = append(all, v)
	}
	return all, err
}

func TestEachYieldsAllThatMatchPageByPage(t *testing.T) {
	m := storetest.Close(t, memory.New(testkit.Pool(t), 16<<20))
	var names []string
	for i := range 2*store.PageNames + 1 {
		names = append(names, fmt.Sprintf("%05d", i))
		storetest.Put(t, m, names[i], nil)
	}
	of := func(glob string) (got []string) {
		infos, err := collect(store.Each(t.Context(), m, glob))
		require.NoError(t, err)
		for _, info := range infos {
			got = append(got, info.Name)
		}
		return got
	}
	require.Equal(t, names, of(""))
	require.Equal(t, names[:store.PageNames], func() []string { // a page, and nothing after it
		storetest.Remove(t, m, names[store.PageNames:]...)
		return of("*")
	}())
	require.Equal(t, []string{"00007"}, of("*0007"))
	require.Empty(t, of("x*"))
	_, err := collect(store.Each(t.Context(), m, "["))
	require.ErrorIs(t, err, store.ErrGlob)
	seen := 0
	for info, err := range store.Each(t.Context(), m, "") { // deleted as they come
		require.NoError(t, err)
		storetest.Remove(t, m, info.Name)
		seen++
	}
	require.Equal(t, store.PageNames, seen)
	require.NoError(t, m.Close())
	_, err = collect(store.Each(t.Context(), m, ""))
	require.ErrorIs(t, err, store.ErrClosed)
}
