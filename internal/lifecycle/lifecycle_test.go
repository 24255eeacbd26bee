package lifecycle

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var rewrite = flag.Bool("rewrite", false, "draw the diagrams in docs/wire.md anew")

const wirePage = "../../docs/wire.md"

// drawn is a table as a state diagram.
func drawn(table []transition) string {
	type arrow struct{ from, to State }
	var arrows []arrow
	labels := map[arrow][]string{}
	for _, t := range table {
		for _, s := range t.from {
			a := arrow{s, t.to}
			if labels[a] == nil {
				arrows = append(arrows, a)
			}
			labels[a] = append(labels[a], t.when)
		}
	}
	slices.SortStableFunc(arrows, func(a, b arrow) int { return int(a.from) - int(b.from) })
	var b strings.Builder
	b.WriteString("```mermaid\nstateDiagram-v2\n    [*] --> Opening\n")
	for _, a := range arrows {
		to := a.to.String()
		if a.to == Closed {
			to = "[*]"
		}
		fmt.Fprintf(&b, "    %v --> %s: %s\n", a.from, to, strings.Join(labels[a], ",<br/>or "))
	}
	b.WriteString("```\n")
	return b.String()
}

func TestTheStateDiagramsInTheDocsAreTheTables(t *testing.T) {
	text, err := os.ReadFile(wirePage)
	require.NoError(t, err)
	got := string(text)
	for side, table := range map[string][]transition{"client": clientTable, "server": serverTable} {
		head, rest, ok := strings.Cut(got, "<!-- states of a call: "+side+" -->\n")
		require.True(t, ok, "no mark for the %s", side)
		_, tail, ok := strings.Cut(rest, "\n```\n")
		require.True(t, ok, "no diagram for the %s", side)
		got = head + "<!-- states of a call: " + side + " -->\n" + drawn(table) + tail
	}
	if *rewrite {
		require.NoError(t, os.WriteFile(wirePage, []byte(got), 0o644))
		return
	}
	require.Equal(t, string(text), got, "accept with make states-rewrite")
}

func TestACallOnlyMovesDownTheListOfStates(t *testing.T) {
	for side, table := range map[string][]transition{"client": clientTable, "server": serverTable} {
		reached, seen := map[State]bool{Opening: true}, map[string]bool{}
		for _, row := range table {
			for _, s := range row.from {
				key := fmt.Sprint(s, row.on)
				require.False(t, seen[key], "%s: two rows for cause %d in %v", side, row.on, s)
				seen[key] = true
				require.Less(t, s, row.to, side)
			}
			reached[row.to] = true
		}
		for _, row := range table {
			for _, s := range row.from {
				require.True(t, reached[s], "%s: nothing leads to %v", side, s)
			}
		}
		for s := range reached { // a session can end in any state, and every call closes
			m := movesOf(table)
			for s < Over {
				s = m[s][SessionOver]
				require.NotEqual(t, Opening, s, side)
			}
			require.True(t, s == Closed || m[s][Released] == Closed, side)
		}
	}
}
