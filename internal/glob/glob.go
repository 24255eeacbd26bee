// Package glob matches names of tensors with patterns. Any package may use it; it has no
// bytes of its own.
//
// The syntax is path.Match's, and ** stands for anything, slashes too.
package glob

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"unicode/utf8"
)

// ErrPattern is wrapped when a pattern is malformed or longer than MaxBytes.
var ErrPattern = errors.New("glob: bad pattern")

// MaxBytes is the longest pattern in bytes: that of a name.
const MaxBytes = 512

// Glob is a compiled pattern. It follows all ways to match at once, a bit for each:
// path.Match backtracks, which takes fifty times as long for a bad pattern and long
// names. Safe for concurrent use.
type Glob struct {
	elements []element
	stars    states // bit i: anything but slashes may come before element i
	all      states // bit i: anything may
	words    int    // of states, as far as there are elements
	// Characters from bounds[i] to below bounds[i+1] are the same to every element:
	// takers[i] has bit n where element n takes them.
	bounds []rune
	takers []states
}

// states has bit i set where the first i elements have matched.
type states [MaxBytes/64 + 1]uint64

func (s *states) set(i int)      { s[i/64] |= 1 << (i % 64) }
func (s *states) has(i int) bool { return s[i/64]>>(i%64)&1 > 0 }

// element takes one character: one within its spans, or one outside of them.
type element struct {
	spans   []span
	outside bool
}

type span struct{ lo, hi rune }

func (e *element) takes(r rune) bool {
	return slices.ContainsFunc(e.spans, func(s span) bool { return s.lo <= r && r <= s.hi }) != e.outside
}

// Parse compiles a pattern; the error wraps ErrPattern.
func Parse(pattern string) (*Glob, error) {
	if len(pattern) > MaxBytes { // which also bounds the elements
		return nil, fmt.Errorf("%w: %d bytes, the limit is %d", ErrPattern, len(pattern), MaxBytes)
	}
	if _, err := path.Match(pattern, ""); err != nil {
		return nil, fmt.Errorf("%w: %.64q: * and ? stand for all but a slash, ** for all, [a-z] for one of a range", ErrPattern, pattern)
	}
	g := new(Glob)
	for rest := pattern; rest != ""; {
		var e element
		switch rest[0] {
		case '*':
			g.stars.set(len(g.elements))
			if rest = rest[1:]; strings.HasPrefix(rest, "*") {
				g.all.set(len(g.elements))
			}
			continue
		case '?':
			e, rest = element{[]span{{'/', '/'}}, true}, rest[1:]
		case '[':
			e, rest = parseClass(rest[1:])
		default:
			r, after := parseCharacter(rest)
			if rest = after; r != broken {
				e.spans = []span{{r, r}}
			}
		}
		g.elements = append(g.elements, e)
	}
	g.words = len(g.elements)/64 + 1
	g.bounds = []rune{0}
	for _, e := range g.elements {
		for _, s := range e.spans {
			g.bounds = append(g.bounds, s.lo, s.hi+1)
		}
	}
	slices.Sort(g.bounds)
	g.bounds = slices.Compact(g.bounds)
	g.takers = make([]states, len(g.bounds))
	for n, r := range g.bounds {
		for i, e := range g.elements {
			if e.takes(r) {
				g.takers[n].set(i)
			}
		}
	}
	return g, nil
}

// parseClass reads a class that path.Match found to be well formed, from behind its
// bracket on.
func parseClass(rest string) (element, string) {
	var e element
	if rest[0] == '^' {
		e.outside, rest = true, rest[1:]
	}
	for len(e.spans) == 0 || rest[0] != ']' {
		var s span
		s.lo, rest = parseCharacter(rest)
		if s.hi = s.lo; rest[0] == '-' {
			s.hi, rest = parseCharacter(rest[1:])
		}
		e.spans = append(e.spans, s)
	}
	return e, rest[1:]
}

// broken stands for a byte that is no UTF-8: no name has it.
const broken rune = -1

func parseCharacter(rest string) (rune, string) {
	if rest[0] == '\\' {
		rest = rest[1:]
	}
	r, n := utf8.DecodeRuneInString(rest)
	if r == utf8.RuneError && n == 1 {
		r = broken
	}
	return r, rest[n:]
}

// Match reports whether the pattern matches all of a name.
func (g *Glob) Match(name string) bool {
	now := states{1}
	for _, r := range name {
		n, there := slices.BinarySearch(g.bounds, r)
		if !there {
			n--
		}
		takers := &g.takers[n]
		var carry, left uint64
		for i := range now[:g.words] {
			step := now[i] & takers[i]
			next := step<<1 | carry
			carry = step >> 63
			if r != '/' {
				next |= now[i] & g.stars[i]
			}
			next |= now[i] & g.all[i]
			now[i] = next
			left |= next
		}
		if left == 0 {
			return false
		}
	}
	return now.has(len(g.elements))
}

// Prefix returns what all names that match a pattern begin with.
func Prefix(pattern string) string {
	if i := strings.IndexAny(pattern, `*?[\`); i >= 0 {
		return pattern[:i]
	}
	return pattern
}

// Quote returns a pattern that matches name alone.
func Quote(name string) string {
	return strings.NewReplacer(`*`, `\*`, `?`, `\?`, `[`, `\[`, `\`, `\\`).Replace(name)
}
