package bench

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// measured is a report of uploads that took so long, and so much longer than a peer's.
func measured(took time.Duration, relative float64) *Report {
	pair := Pair{Ours: Sample{Time: took, CPU: time.Second}, Theirs: Sample{Time: time.Second}}
	c := func(work string, ratio float64) *Comparison {
		return &Comparison{Net: "tcp", Work: work, Peer: "raw", Bytes: 1 << 20, Ratio: Spread{Median: ratio}, Pairs: []Pair{pair}}
	}
	return &Report{
		Comparisons:  []*Comparison{c("upload", 1/relative), c(call, relative)},
		FirstResults: []FirstResult{{Net: "tcp", First: time.Millisecond, Ratio: Spread{Median: 0.5}}},
	}
}

// row returns the line of a figure.
func row(t *testing.T, turns *Turns, name string) string {
	t.Helper()
	var b strings.Builder
	require.NoError(t, turns.WriteText(&b))
	for line := range strings.Lines(b.String()) {
		if strings.HasPrefix(line, name) {
			return line
		}
	}
	t.Fatalf("no %q in\n%s", name, &b)
	return ""
}

func TestAFigureIsMarkedWhenItIsWorseByMoreThanItsError(t *testing.T) {
	for name, tc := range map[string]struct {
		now   []float64 // times, in ms, of which each was 100 before
		worse bool
	}{
		"slower every time":  {[]float64{109, 110, 111, 110, 109, 111}, true},
		"the same":           {[]float64{100, 100, 100, 100, 100, 100}, false},
		"slower at times":    {[]float64{80, 130, 101, 120, 85, 103}, false},
		"faster every time":  {[]float64{90, 91, 89, 90, 92, 90}, false},
		"slower, but a turn": {[]float64{110, 110, 110, 110, 110, 70}, false},
	} {
		t.Run(name, func(t *testing.T) {
			var turns Turns
			for _, ms := range tc.now {
				took := time.Duration(ms * float64(time.Millisecond))
				turns.AddReports(measured(100*time.Millisecond, 1), measured(took, ms/100))
			}
			for _, figure := range []string{"tcp upload of 1 MiB, ms", "tcp upload of 1 MiB, to raw", "tcp call of 1 MiB, to raw"} {
				require.Equal(t, tc.worse, strings.Contains(row(t, &turns, figure), "WORSE"), figure)
			}
			require.NotContains(t, row(t, &turns, "tcp first result, ms"), "WORSE")
		})
	}
}

func TestAFigureThatOneProgramLacksIsLeftOut(t *testing.T) {
	before := measured(time.Second, 1)
	before.FirstResults = nil
	var turns Turns
	turns.AddReports(before, measured(time.Second, 1))
	require.NotContains(t, turns.figures, "tcp first result, ms")
	require.Contains(t, turns.figures, "tcp upload of 1 MiB, ms")
}

func TestPairsAreTurnsOfTheOldProgramAndTheNew(t *testing.T) {
	c := &Comparison{Net: "tcp", Work: "echo", Bytes: 1e9, Pairs: []Pair{{
		Ours: Sample{Time: 2 * time.Second, CPU: time.Second}, Theirs: Sample{Time: time.Second, CPU: 4 * time.Second},
	}}}
	var turns Turns
	turns.AddPairs(c)
	require.Equal(t, []turn{{1000, 2000}}, turns.figures[c.name()+", ms"])
	require.Equal(t, []turn{{4, 1}}, turns.figures[c.name()+", CPU s/GB"])
}
