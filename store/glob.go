package store

import (
	"fmt"
	"path"
	"slices"
	"unicode/utf8"
)

// glob is a compiled pattern of path.Match. It follows all ways to match at once, a bit
// for each: path.Match backtracks, which takes fifty times as long for a bad pattern and
// long names.
type glob struct {
	elements []element
	stars    states // bit i: anything but slashes may come before element i
	words    int    // of states, as far as there are elements
	// Characters from bounds[i] to below bounds[i+1] are the same to every element:
	// takers[i] has bit n where element n takes them.
	bounds []rune
	takers []states
}

// states has bit i set where the first i elements have matched.
type states [MaxName/64 + 1]uint64

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

// parseGlob reports, with an error that wraps ErrGlob, when names cannot be matched
// with a pattern.
func parseGlob(pattern string) (*glob, error) {
	if len(pattern) > MaxName { // which also bounds the elements
		return nil, fmt.Errorf("%w: %d bytes, the limit is %d", ErrGlob, len(pattern), MaxName)
	}
	if _, err := path.Match(pattern, ""); err != nil {
		return nil, fmt.Errorf("%w: %.*q: * and ? stand for all but a slash, [a-z] for one of a range", ErrGlob, quoted, pattern)
	}
	g := new(glob)
	for rest := pattern; rest != ""; {
		var e element
		switch rest[0] {
		case '*':
			g.stars.set(len(g.elements))
			rest = rest[1:]
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

// match reports whether the pattern matches all of a name.
func (g *glob) match(name string) bool {
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
			now[i] = next
			left |= next
		}
		if left == 0 {
			return false
		}
	}
	return now.has(len(g.elements))
}
