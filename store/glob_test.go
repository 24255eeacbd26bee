package store

import (
	"context"
	"fmt"
	"path"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/testkit"
)

// matches holds a glob to path.Match.
func matches(t *testing.T, pattern, name string) {
	g, err := parseGlob(pattern)
	want, malformed := path.Match(pattern, name)
	if malformed != nil {
		require.ErrorIs(t, err, ErrGlob)
		return
	}
	require.NoError(t, err, "%q", pattern)
	if got := g.match(name); got != want {
		t.Fatalf("%q matches %q: %v, want %v", pattern, name, got, want)
	}
}

func TestAGlobMatchesAsTheStandardLibraryDoes(t *testing.T) {
	patterns := []string{
		"", "*", "**", "?", "a", "a*", "*a", "a*b", "*a*", "a*b*c", "?*", "*?", "a?c", "*/*", "*/b", "a/*/c", "[a-c]", "[^a-c]", "*[ab]", "[ab]*",
		"\\*", "*\\*", "\\[a", "[\\]]", "[\\-a]", "[]a]", "[", "a[", "[a", "[a-", "[a-]", "[^]", "\\", "*\\", "é", "?é", "[à-ü]", "[^é]", "a\xff", "[\xff]", "[b-a]", "[a-cb-d]", "*aab", "*a?b",
	}
	names := []string{"", "a", "b", "ab", "abc", "aab", "aaab", "aaaa", "a/b", "a/b/c", "a/x/c", "/", "a/", "*", "a*", "[a", "]", "-", "é", "aé", "éa", "ü", "\ufffd", "ab\nc"}
	for _, p := range patterns {
		for _, n := range names {
			matches(t, p, n)
		}
	}
	// As many elements as a word of states has bits, one fewer and one more, and the most.
	for _, n := range []int{63, 64, 65, 127, 128, 129, MaxName - 1, MaxName} {
		long := strings.Repeat("a", n)
		for _, p := range []string{long, long[1:] + "*", "*" + long[1:], "*" + long[2:] + "b", long[1:] + "?", strings.Repeat("?", n), strings.Repeat("*a", n/2)} {
			for _, name := range []string{long, long[1:], long[1:] + "b", long + "a", "b" + long[1:]} {
				matches(t, p, name)
			}
		}
	}
}

func FuzzAGlobMatchesAsTheStandardLibraryDoes(f *testing.F) {
	f.Add("a*[b-d]?\\*/", "axc?*/")
	f.Add("*?é[^ö]", "aéö")
	f.Fuzz(func(t *testing.T, pattern, name string) {
		if len(pattern) > MaxName || len(name) > MaxName || !utf8.ValidString(name) {
			return
		}
		ascii := func(s string) bool { return !strings.ContainsFunc(s, func(r rune) bool { return r >= utf8.RuneSelf }) }
		if strings.Contains(pattern, "*") && !(ascii(pattern) && ascii(name)) {
			return // there a star may end within a character
		}
		matches(t, pattern, name)
	})
}

func TestAGlobTakesCharactersAndNotBytes(t *testing.T) {
	for pattern, names := range map[string]map[string]bool{
		"*[^é]": {"é": false, "éa": true, "aé": false, "ö": true},
		"*?":    {"é": true, "": false, "/": false, "é/": false},
		"*é*":   {"é": true, "aéb": true, "a/éb": false, "e": false},
	} {
		g, err := parseGlob(pattern)
		require.NoError(t, err)
		for name, want := range names {
			require.Equal(t, want, g.match(name), "%q and %q", pattern, name)
		}
	}
}

func TestAGlobIsNoLongerThanAName(t *testing.T) {
	_, err := parseGlob(strings.Repeat("*", MaxName))
	require.NoError(t, err)
	_, err = parseGlob(strings.Repeat("*", MaxName+1))
	require.ErrorIs(t, err, ErrGlob)
	require.ErrorContains(t, err, "513 bytes, the limit is 512")
}

func TestAListEndsAmidAPageWhenItsReaderHasGone(t *testing.T) {
	ctx, end := context.WithCancelCause(t.Context())
	_, err := listPages(ctx, "*a", "", 10, func(string, int) ([]Info, error) {
		end(errStopped)
		return []Info{{Name: "a"}, {Name: "b"}}, nil // the last ones
	})
	require.ErrorIs(t, err, errStopped)
}

func TestAsManyListsLookAtNamesAtATimeAsThereIsRoom(t *testing.T) {
	const more = 5
	room := max(1, runtime.GOMAXPROCS(0)-1)
	var looking, most atomic.Int64
	begun := make(chan struct{}, room+more)
	goOn := make(chan struct{})
	ended := make(chan error, room+more)
	for range room + more {
		go func() {
			_, err := listPages(t.Context(), "", "", 10, func(string, int) ([]Info, error) {
				n := looking.Add(1)
				defer looking.Add(-1)
				for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
				}
				begun <- struct{}{}
				<-goOn
				return nil, nil
			})
			ended <- err
		}()
	}
	for range room {
		<-begun
	}
	ctx, end := context.WithCancelCause(t.Context())
	waiting := make(chan error, 1)
	go func() {
		_, err := listPages(ctx, "", "", 10, func(string, int) ([]Info, error) { return nil, errStopped })
		waiting <- err
	}()
	end(context.DeadlineExceeded)
	require.ErrorIs(t, <-waiting, context.DeadlineExceeded, "who waits for room may leave")
	close(goOn)
	for range room + more {
		require.NoError(t, <-ended)
	}
	require.EqualValues(t, room, most.Load())
}

// What a peer can do worst: each of many long names nearly matches everywhere.
func worstGlobs() map[string]string {
	return map[string]string{
		"literal":   "*" + strings.Repeat("a", 250) + "b",
		"any":       "*" + strings.Repeat("?", 250) + "b",
		"stars":     strings.Repeat("*a", 255) + "b",
		"classes":   "*" + strings.Repeat("[a]", 169) + "b",
		"letters":   "*" + strings.Repeat("é", 254) + "b",
		"many":      "*[" + letters(0x100, 250) + "]b",
		"ranges":    "*" + strings.Repeat("[à-é]", 72) + "b",
		"negations": "*" + strings.Repeat("[^b]", 126) + "b",
	}
}

func letters(from rune, n int) string {
	var b strings.Builder
	for r := from; r < from+rune(n); r++ {
		b.WriteRune(r)
	}
	return b.String()
}

func TestTheWorstGlobsMatchNothingAndEnd(t *testing.T) {
	m := closing(t, NewMemory(testkit.Pool(t), 64*mib))
	for i := range 3000 {
		put(t, m, fmt.Sprintf("%06d", i)+strings.Repeat("a", MaxName-6), nil)
	}
	for _, pattern := range worstGlobs() {
		infos, err := m.List(t.Context(), pattern, "", 10)
		require.NoError(t, err)
		require.Empty(t, infos)
	}
}

func BenchmarkGlob(b *testing.B) {
	for what, pattern := range worstGlobs() {
		for letters, name := range map[string]string{"ascii": strings.Repeat("a", MaxName), "others": strings.Repeat("é", MaxName/2)} {
			b.Run("pattern="+what+"/name="+letters, func(b *testing.B) {
				g, err := parseGlob(pattern)
				require.NoError(b, err)
				b.ReportAllocs()
				for b.Loop() {
					g.match(name)
				}
			})
		}
	}
	for what, pattern := range worstGlobs() {
		b.Run("parse="+what, func(b *testing.B) {
			for b.Loop() {
				_, _ = parseGlob(pattern)
			}
		})
	}
	b.Run("parse=different", func(b *testing.B) {
		for b.Loop() {
			_, _ = parseGlob(letters(0x100, MaxName/2))
		}
	})
}
