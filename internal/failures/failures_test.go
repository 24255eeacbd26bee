package failures

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

func of(model string) Failure {
	return Failure{Call: tensor.NewID(), Model: model, Code: frame.Internal}
}

func logging() (*Log, *bytes.Buffer) {
	out := new(bytes.Buffer)
	return New(slog.New(slog.NewTextHandler(out, nil))), out
}

func panicking(model string, value any) (err error) {
	defer engine.Recovered(model, &err)
	panic(value)
}

type otherError struct{ error }

// placed is a failure from a place.
type placed string

func (placed) Error() string                  { return "x" }
func (p placed) Trace() (place, trace string) { return string(p), "trace" }

func TestTheFirstFailureOfEachKindIsLogged(t *testing.T) {
	l, out := logging()
	for i := range 100 {
		l.Add(of("a"), fmt.Errorf("a failed: %d", i))
	}
	require.Equal(t, 7, strings.Count(out.String(), "\n"), "as the number doubles")
	for what, add := range map[string]func(){
		"another model": func() { l.Add(of("b"), errors.New("b")) },
		"another code":  func() { l.Add(Failure{Model: "a", Code: frame.Unknown}, fmt.Errorf("c")) },
		"another error": func() { l.Add(of("a"), otherError{errors.New("d")}) },
		"a panic":       func() { l.Add(of("a"), panicking("a", "oh")) },
		"of the runtime": func() {
			l.Add(of("a"), func() (err error) {
				defer engine.Recovered("a", &err)
				_ = []int{}[len(out.Bytes()) : len(out.Bytes())+1]
				return nil
			}())
		},
		"of another model": func() { l.Add(of("b"), panicking("b", "oh")) },
	} {
		out.Reset()
		add()
		require.Equal(t, 1, strings.Count(out.String(), "\n"), what)
	}
}

func TestAPanicHasItsPlaceAndItsStack(t *testing.T) {
	l, out := logging()
	for range 100 {
		l.Add(of("a"), panicking("a", "oh\nno"))
	}
	require.Equal(t, 7, strings.Count(out.String(), "\n"))
	require.Contains(t, out.String(), "goroutine ")
	f := l.Before(0, 1, func(*Failure) bool { return true })[0]
	require.Regexp(t, `"a" panicked: oh no \(.*failures_test\.go:\d+\)$`, f.Cause)
	require.NotContains(t, f.Cause, "goroutine ")
}

func TestTheKindsOfAModelHaveALimit(t *testing.T) {
	l, out := logging()
	kind := func(model string, n int) { l.Add(of(model), placed(fmt.Sprint("line ", n))) }
	const kinds = 64
	for n := range 10 * kinds {
		kind("a", n)
	}
	lines := strings.Count(out.String(), "\n")
	require.Less(t, lines, kinds+12, "all others are one kind")
	require.GreaterOrEqual(t, lines, kinds)
	for n := range 2 * kept {
		kind(fmt.Sprint("m", n), 1)
	}
	require.LessOrEqual(t, len(l.kinds), kept+1)
}

func TestAPlaceHasALimit(t *testing.T) {
	l, out := logging()
	for _, end := range []string{"a", "b", "c"} {
		l.Add(of("m"), placed(strings.Repeat("x", 2*placeBytes)+end))
	}
	require.Equal(t, 2, strings.Count(out.String(), "\n"), "they are one kind")
	place, _ := traceOf(placed(strings.Repeat("x", 2*placeBytes)))
	require.Less(t, len(place), placeBytes+32)
}

func TestTheLastFailuresAreKept(t *testing.T) {
	l := New(slog.New(slog.DiscardHandler))
	all := func(*Failure) bool { return true }
	require.Empty(t, l.Before(0, 10, all))
	long := strings.Repeat("ö", causeBytes) + "\xff"
	for n := 1; n <= kept+10; n++ {
		l.Add(of(fmt.Sprint(n)), errors.New(long))
		if n == 3 {
			require.Len(t, l.Before(0, 10, all), 3)
		}
	}
	list := l.Before(0, 2*kept, all)
	require.Len(t, list, kept)
	require.Equal(t, fmt.Sprint(kept+10), list[0].Model)
	require.Equal(t, "11", list[kept-1].Model)
	require.LessOrEqual(t, len(list[0].Cause), causeBytes)
	var paged []Failure
	for before := uint64(0); ; before = paged[len(paged)-1].Number {
		page := l.Before(before, 100, all)
		if paged = append(paged, page...); len(page) < 100 {
			break
		}
	}
	require.Equal(t, list, paged)
	require.Empty(t, l.Before(1, 10, all))
	one := l.Before(0, 10, func(f *Failure) bool { return f.Model == "500" })
	require.Len(t, one, 1)
	require.EqualValues(t, 500, one[0].Number)
}
