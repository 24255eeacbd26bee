package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/codec"
)

// fixed is a peer that always takes so long.
func fixed(name string, s Sample) Peer {
	return Peer{name, func(context.Context) (Sample, error) { return s, nil }}
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
				return Peer{name, func(context.Context) (Sample, error) {
					order.WriteString(name)
					return Sample{Time: d()}, nil
				}}
			}
			all, err := Config{MinRounds: MinRounds, MaxRounds: MaxRounds}.Rounds(t.Context(), Comparison{Work: Upload, Bytes: 8},
				peer("o", func() time.Duration { return 50 }), peer("a", func() time.Duration { return 100 }),
				peer("b", func() time.Duration { n++; return tc.times(n) }))
			require.NoError(t, err)
			require.True(t, strings.HasPrefix(strings.Repeat("oabbao", MaxRounds), order.String()), order.String())
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
	_, err := Smoke(nil).Rounds(t.Context(), Comparison{Work: Echo}, fixed("o", Sample{Time: 1}),
		Peer{"a", func(context.Context) (Sample, error) { return Sample{}, why }})
	require.ErrorIs(t, err, why)
	require.ErrorContains(t, err, "a, echo")
}

func TestRatiosAreOfRatesOrOfTimesAndHeldAgainstWhatIsRequired(t *testing.T) {
	for _, tc := range []struct {
		net           string
		processes     int
		work          Op
		who, beside   string
		theirs        time.Duration
		ratio         float64
		required, and string
	}{
		{"tcp", 2, Upload, OursWith(codec.CRC32C), RawName(codec.CRC32C, ChunkBytes), 95, 0.95, "at least 0.95: met", "at most 1.15: met"},
		{"tcp", 2, Echo, OursWith(codec.CRC32), RawName(codec.CRC32, smallPiece), 94, 0.94, "at least 0.95: MISSED", "at most 1.15: met"},
		{"tcp", 2, Upload, OursWith(codec.CRC32), RawName(codec.CRC32, smallPiece), 80, 0.8, "at least 0.95: MISSED", "at most 1.15: MISSED"},
		{"tcp", 2, Upload, OursWith(codec.CRC32C), RawName(codec.CRC32, ChunkBytes), 94, 0.94, "–", "–"},
		{"tcp", 1, Upload, OursWith(codec.CRC32C), RawName(codec.CRC32C, ChunkBytes), 94, 0.94, "–", "–"},
		{"unix", 2, Upload, OursWith(codec.CRC32C), RawName(codec.CRC32C, ChunkBytes), 90, 0.9, "at least 0.9: met", "–"},
		{"tcp", 2, Call, Tensorferry, StockGRPC.Name, 50, 2, "at most 1.5: MISSED", "–"},
		{"tcp", 2, Call, Tensorferry, StockGRPC.Name, 80, 1.25, "at most 1.5: met", "–"},
		{"tcp", 2, Call, Tensorferry, RawName(codec.CRC32C, ChunkBytes), 80, 1.25, "–", "–"},
		{"tcp", 2, Pull, Folder, RawName(codec.CRC32C, ChunkBytes), 79, 0.79, "at least 0.8: MISSED", "–"},
		{"tcp", 2, Push, Folder, Copying, 60, 0.6, "at least 0.6: met", "–"},
	} {
		sample := func(d time.Duration) Sample { return Sample{Time: d, CPU: 2 * d, P99: 3 * d} }
		c := Config{MinRounds: 1, MaxRounds: 1, Rules: Rules()}
		all, err := c.Rounds(t.Context(), Comparison{Net: tc.net, Processes: tc.processes, Work: tc.work, Bytes: 1000},
			fixed(tc.who, sample(100)), fixed(tc.beside, sample(tc.theirs)))
		require.NoError(t, err)
		x := all[0]
		cost := 1 / tc.ratio
		if latency[tc.work] {
			cost = tc.ratio
		}
		require.InDelta(t, tc.ratio, x.Ratio.Median, 1e-9)
		require.InDelta(t, cost, x.Cost.Median, 1e-9)
		require.Equal(t, []string{tc.required, tc.and}, []string{x.Required.String(), x.RequiredCost.String()}, "%v", tc)
		require.Equal(t, Figures{Time: 100, P99: 300, Rate: 10, CPU: 0.2}, x.Ours)
		c.Smoke = true
		all, err = c.Rounds(t.Context(), *x, fixed(tc.who, sample(100)), fixed(tc.beside, sample(tc.theirs)))
		require.NoError(t, err)
		require.Equal(t, x.Required, all[0].Required, "a smoke run judges nothing")
	}
	all, err := Config{MinRounds: 1, MaxRounds: 1, Rules: Rules()}.Rounds(t.Context(), Comparison{Net: "tcp", Processes: 2, Work: FirstResult, Bytes: 8},
		fixed(Tensorferry, Sample{Time: 6, Total: 100}))
	require.NoError(t, err)
	require.Equal(t, "at most 0.05: MISSED", all[0].Required.String())
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
		for _, work := range []Op{Upload, Call} {
			x := &Comparison{Net: "tcp", Processes: 2, Work: work, Bytes: 1 << 20, Who: Tensorferry, Beside: Old + Tensorferry}
			for _, n := range tc.now {
				d := time.Duration(n)
				x.Pairs = append(x.Pairs, Pair{Sample{Time: d, CPU: d, P99: d}, Sample{Time: 100, CPU: 100, P99: 100}})
			}
			x.Sum()
			ratio, cost := x.worse()
			require.Equal(t, tc.worse, ratio, "%s %s", name, work)
			require.Equal(t, tc.worse, cost, "%s %s", name, work)
			var text bytes.Buffer
			require.NoError(t, (&Report{Comparisons: []*Comparison{x}}).WriteText(&text))
			require.Equal(t, tc.worse, strings.Contains(text.String(), "WORSE: RATIO, COST"))
			x.Beside = Tensorferry
			ratio, cost = x.worse()
			require.False(t, ratio || cost)
		}
	}
}

func TestASmokeRunReportsEveryWorkOfTheSuite(t *testing.T) {
	c := briefly(t)
	r, err := c.Run(t.Context(), Suite([]string{"tcp"}, 2*ChunkBytes))
	require.NoError(t, err)
	var text bytes.Buffer
	r.Comparisons[0].Delay = RoadDelay
	require.NoError(t, (&Report{Smoke: true, Comparisons: r.Comparisons}).WriteText(&text))
	for _, want := range []string{
		"SMOKE RUN", "A server process and a client process each", "Both ends in one process", "through a proxy", "tcp, 50ms",
		"upload of 1 MiB", "relu of 1 MiB", "call of 30 KB", "first-result of 1 MiB", "call-beside-upload of 1 MiB", "pull-to-file of 1 MiB", "push of 1 MiB",
		"beside raw socket, CRC-32, 256 KiB", "beside " + Copying,
	} {
		require.Contains(t, text.String(), want)
	}
	again := new(Report)
	data, err := json.Marshal(r)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(data, again))
	require.Equal(t, r, again)
}
