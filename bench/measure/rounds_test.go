package measure

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/bench"
)

// fixed is a peer that always takes so long.
func fixed(name string, s bench.Sample) Peer {
	return Peer{name, func(context.Context) (bench.Sample, error) { return s, nil }}
}

func TestRoundsTurnAroundUntilEveryMedianIsStable(t *testing.T) {
	var order strings.Builder
	for name, tc := range map[string]struct {
		times       func(n int) time.Duration // of one of three
		least, most int
	}{
		"always the same": {func(int) time.Duration { return 50 }, 9, 9},
		"never the same":  {func(n int) time.Duration { return time.Duration(100 + 900*(n%2)) }, 25, 25},
		"slow at first":   {func(n int) time.Duration { return time.Duration(50 + 1000*max(0, 6-n)) }, 10, 24},
	} {
		t.Run(name, func(t *testing.T) {
			order.Reset()
			n := -2 // the first round only warms up
			peer := func(name string, d func() time.Duration) Peer {
				return Peer{name, func(context.Context) (bench.Sample, error) {
					order.WriteString(name)
					return bench.Sample{Time: d()}, nil
				}}
			}
			all, err := Config{MinRounds: bench.MinRounds, MaxRounds: bench.MaxRounds}.Rounds(t.Context(), Comparison{Work: bench.Upload, Bytes: 8},
				peer("o", func() time.Duration { return 50 }), peer("a", func() time.Duration { return 100 }),
				peer("b", func() time.Duration { n++; return tc.times(n) }))
			require.NoError(t, err)
			require.True(t, strings.HasPrefix(strings.Repeat("oabbao", bench.MaxRounds), order.String()), order.String())
			for _, x := range all {
				require.GreaterOrEqual(t, len(x.Pairs), tc.least)
				require.LessOrEqual(t, len(x.Pairs), tc.most)
				require.Equal(t, len(x.Pairs), x.Ratio.N)
			}
		})
	}
}

func TestRoundsEndWithTheFirstFailure(t *testing.T) {
	why := errors.New("no more")
	_, err := Smoke().Rounds(t.Context(), Comparison{Work: bench.Echo}, fixed("o", bench.Sample{Time: 1}),
		Peer{"a", func(context.Context) (bench.Sample, error) { return bench.Sample{}, why }})
	require.ErrorIs(t, err, why)
	require.ErrorContains(t, err, "a, echo")
}

func TestAnOldProgramIsMarkedWhenTheNewOneIsWorseByMoreThanTheError(t *testing.T) {
	for name, tc := range map[string]struct {
		now   []int // times, of which each was 100 before
		worse bool
	}{
		"slower every time":  {[]int{109, 110, 111, 110, 109, 111}, true},
		"the same":           {[]int{100, 100, 100, 100, 100, 100}, false},
		"slower at times":    {[]int{80, 130, 101, 120, 85, 103}, false},
		"faster every time":  {[]int{90, 91, 89, 90, 92, 90}, false},
		"slower, but a turn": {[]int{110, 110, 110, 110, 110, 70}, false},
	} {
		for _, work := range []bench.Op{bench.Upload, bench.Call} {
			x := &Comparison{Net: "tcp", Work: work, Bytes: 1 << 20, Who: "ours", Beside: Old + "ours"}
			for _, n := range tc.now {
				d := time.Duration(n)
				x.Pairs = append(x.Pairs, Pair{bench.Sample{Time: d, CPU: d, P99: d}, bench.Sample{Time: 100, CPU: 100, P99: 100}})
			}
			x.Sum()
			ratio, cost := x.worse()
			require.Equal(t, tc.worse, ratio, "%s %s", name, work)
			require.Equal(t, tc.worse, cost, "%s %s", name, work)
			var text bytes.Buffer
			require.NoError(t, (&Report{Comparisons: []*Comparison{x}}).WriteText(&text))
			require.Equal(t, tc.worse, strings.Contains(text.String(), "WORSE: RATIO, COST"))
		}
	}
}
