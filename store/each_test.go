package store

import (
	"fmt"
	"iter"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/testkit"
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
	m := closing(t, NewMemory(testkit.Pool(t), 16*mib))
	var names []string
	for i := range 2*pageNames + 1 {
		names = append(names, fmt.Sprintf("%05d", i))
		put(t, m, names[i], nil)
	}
	of := func(glob string) (got []string) {
		infos, err := collect(Each(t.Context(), m, glob))
		require.NoError(t, err)
		for _, info := range infos {
			got = append(got, info.Name)
		}
		return got
	}
	require.Equal(t, names, of(""))
	require.Equal(t, names[:pageNames], func() []string { // a page, and nothing after it
		remove(t, m, names[pageNames:]...)
		return of("*")
	}())
	require.Equal(t, []string{"00007"}, of("*0007"))
	require.Empty(t, of("x*"))
	_, err := collect(Each(t.Context(), m, "["))
	require.ErrorIs(t, err, ErrGlob)
	seen := 0
	for info, err := range Each(t.Context(), m, "") { // deleted as they come
		require.NoError(t, err)
		remove(t, m, info.Name)
		seen++
	}
	require.Equal(t, pageNames, seen)
	require.NoError(t, m.Close())
	_, err = collect(Each(t.Context(), m, ""))
	require.ErrorIs(t, err, ErrClosed)
}
