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

// sequence yields values, and then an error unless it is nil.
func sequence(err error, values ...string) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		for _, v := range values {
			if !yield(v, nil) {
				return
			}
		}
		if err != nil {
			yield("", err)
		}
	}
}

func TestANameIsTakenAsItIsBeforeItIsAGlob(t *testing.T) {
	absent := fmt.Errorf("%w: no such", ErrNotFound)
	for what, tc := range map[string]struct {
		name     string
		literal  error
		matching iter.Seq2[string, error]
		want     []string
		err      error
	}{
		"a name":                          {"a", nil, sequence(nil, "b"), []string{"a"}, nil},
		"no such name":                    {"a", absent, sequence(nil, "b"), nil, ErrNotFound},
		"a name that looks like a glob":   {"a*", nil, sequence(nil, "ab"), []string{"a*"}, nil},
		"a glob":                          {"a*", absent, sequence(nil, "ab", "ac"), []string{"ab", "ac"}, nil},
		"a letter":                        {"a?", absent, sequence(nil, "ab"), []string{"ab"}, nil},
		"a class":                         {"[a]", absent, sequence(nil, "a"), []string{"a"}, nil},
		"a glob that nothing matches":     {"a*", absent, sequence(nil), nil, ErrNotFound},
		"a store that fails by name":      {"a*", errStopped, sequence(nil, "ab"), nil, errStopped},
		"a store that fails in the midst": {"a*", absent, sequence(errStopped, "ab"), []string{"ab"}, errStopped},
		"a store that fails at once":      {"a*", absent, sequence(errStopped), nil, errStopped},
	} {
		t.Run(what, func(t *testing.T) {
			picked := Pick(tc.name, func() (string, error) { return tc.name, tc.literal }, tc.matching)
			for range 2 {
				got, err := collect(picked)
				require.ErrorIs(t, err, tc.err)
				require.Equal(t, tc.want, got)
			}
			next, stop := iter.Pull2(picked)
			_, err, _ := next()
			stop() // who has enough may leave
			require.Equal(t, len(tc.want) > 0, err == nil)
		})
	}
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
