package glob

import (
	"fmt"
	"path"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// model is path.Match, and ** for anything in patterns without escapes and classes.
func model(pattern, name string) (bool, error) {
	before, after, double := strings.Cut(pattern, "**")
	if !double || strings.ContainsAny(pattern, `\\[`) {
		return path.Match(pattern, name)
	}
	for i := range len(name) + 1 {
		if ok, err := path.Match(before, name[:i]); !ok || err != nil {
			continue
		}
		for j := i; j <= len(name); j++ {
			if ok, err := model(after, name[j:]); ok || err != nil {
				return ok, err
			}
		}
	}
	return false, nil
}

// matches holds a glob to the model.
func matches(t *testing.T, pattern, name string) {
	g, err := Parse(pattern)
	want, malformed := model(pattern, name)
	if malformed != nil {
		require.ErrorIs(t, err, ErrPattern)
		return
	}
	require.NoError(t, err, "%q", pattern)
	if got := g.Match(name); got != want {
		t.Fatalf("%q matches %q: %v, want %v", pattern, name, got, want)
	}
}

func TestAGlobMatchesAsTheStandardLibraryDoes(t *testing.T) {
	patterns := []string{
		"", "*", "**", "?", "a", "a*", "*a", "a*b", "*a*", "a*b*c", "?*", "*?", "a?c", "*/*", "*/b", "a/*/c", "**", "a/**", "**/b", "a**c", "**a**", "/**/", "***", "[a-c]", "[^a-c]", "*[ab]", "[ab]*",
		"\\*", "*\\*", "\\[a", "[\\]]", "[\\-a]", "[]a]", "[", "a[", "[a", "[a-", "[a-]", "[^]", "\\", "*\\", "é", "?é", "[à-ü]", "[^é]", "a\xff", "[\xff]", "[b-a]", "[a-cb-d]", "*aab", "*a?b",
	}
	names := []string{"", "a", "b", "ab", "abc", "aab", "aaab", "aaaa", "a/b", "a/b/c", "a/x/c", "/", "a/", "*", "a*", "[a", "]", "-", "é", "aé", "éa", "ü", "\ufffd", "ab\nc"}
	for _, p := range patterns {
		for _, n := range names {
			matches(t, p, n)
		}
	}
	// As many elements as a word of states has bits, one fewer and one more, and the most.
	for _, n := range []int{63, 64, 65, 127, 128, 129, MaxBytes - 1, MaxBytes} {
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
		if len(pattern) > MaxBytes || len(name) > MaxBytes || !utf8.ValidString(name) {
			return
		}
		ascii := func(s string) bool { return !strings.ContainsFunc(s, func(r rune) bool { return r >= utf8.RuneSelf }) }
		if strings.Contains(pattern, "*") && !(ascii(pattern) && ascii(name)) {
			return // there a star may end within a character
		}
		if strings.Contains(pattern, "**") && (strings.ContainsAny(pattern, `\\[`) || strings.Count(pattern, "**") > 3 || len(name) > 50) {
			return // the model does not know it, or takes too long
		}
		matches(t, pattern, name)
	})
}

func TestAGlobTakesCharactersAndNotBytes(t *testing.T) {
	for pattern, names := range map[string]map[string]bool{
		"*[^é]":   {"é": false, "éa": true, "aé": false, "ö": true},
		"*?":      {"é": true, "": false, "/": false, "é/": false},
		"*é*":     {"é": true, "aéb": true, "a/éb": false, "e": false},
		"**é":     {"é": true, "a/é": true, "/": false},
		`\**`:     {"*": true, "*a": true, "*a/b": false, "a": false},
		"[**]":    {"*": true, "a": false, "/": false},
		"a/[b]**": {"a/b": true, "a/b/c/d": true, "a/c/b": false},
	} {
		g, err := Parse(pattern)
		require.NoError(t, err)
		for name, want := range names {
			require.Equal(t, want, g.Match(name), "%q and %q", pattern, name)
		}
	}
}

func TestAGlobIsNoLongerThanAName(t *testing.T) {
	_, err := Parse(strings.Repeat("*", MaxBytes))
	require.NoError(t, err)
	_, err = Parse(strings.Repeat("*", MaxBytes+1))
	require.ErrorIs(t, err, ErrPattern)
	require.ErrorContains(t, err, "513 bytes, the limit is 512")
}

// What a peer can do worst: each of many long names nearly matches everywhere.
func worstGlobs() map[string]string {
	return map[string]string{
		"doubles":   strings.Repeat("**a", 170) + "b",
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
	for _, pattern := range worstGlobs() {
		g, err := Parse(pattern)
		require.NoError(t, err)
		for i := range 3000 {
			require.False(t, g.Match(fmt.Sprintf("%06d", i)+strings.Repeat("a", MaxBytes-6)))
		}
	}
}

func BenchmarkGlob(b *testing.B) {
	for what, pattern := range worstGlobs() {
		for letters, name := range map[string]string{"ascii": strings.Repeat("a", MaxBytes), "others": strings.Repeat("é", MaxBytes/2)} {
			b.Run("pattern="+what+"/name="+letters, func(b *testing.B) {
				g, err := Parse(pattern)
				require.NoError(b, err)
				b.ReportAllocs()
				for b.Loop() {
					g.Match(name)
				}
			})
		}
	}
	for what, pattern := range worstGlobs() {
		b.Run("parse="+what, func(b *testing.B) {
			for b.Loop() {
				_, _ = Parse(pattern)
			}
		})
	}
	b.Run("parse=different", func(b *testing.B) {
		for b.Loop() {
			_, _ = Parse(letters(0x100, MaxBytes/2))
		}
	})
}

func TestAPrefixIsWhatAllMatchesBeginWith(t *testing.T) {
	for pattern, want := range map[string]string{"": "", "a/b": "a/b", "a/*": "a/", "a?": "a", "**": "", "x[1]": "x", `x\*`: "x"} {
		if got := Prefix(pattern); got != want {
			t.Errorf("Prefix(%q) = %q, want %q", pattern, got, want)
		}
	}
}
