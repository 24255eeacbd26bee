package kinds

import (
	"bytes"
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/bench/measure"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/bench"
)

// fixed is a peer that always takes so long.
func fixed(name string, s bench.Sample) measure.Peer {
	return measure.Peer{Name: name, Do: func(context.Context) (bench.Sample, error) { return s, nil }}
}

func TestRatiosAreOfRatesOrOfTimesAndHeldAgainstWhatIsRequired(t *testing.T) {
	for _, tc := range []struct {
		net           string
		work          bench.Op
		who, beside   string
		theirs        time.Duration
		ratio         float64
		required, and string
	}{
		{"tcp", bench.Upload, bench.OursWith(codec.CRC32C), bench.RawName(codec.CRC32C, bench.ChunkBytes), 95, 0.95, "at least 0.95: met", "at most 1.15: met"},
		{"tcp", bench.Echo, bench.OursWith(codec.CRC32), bench.RawName(codec.CRC32, bench.SmallPiece), 94, 0.94, "at least 0.95: MISSED", "at most 1.15: met"},
		{"tcp", bench.Upload, bench.OursWith(codec.CRC32), bench.RawName(codec.CRC32, bench.SmallPiece), 80, 0.8, "at least 0.95: MISSED", "at most 1.15: MISSED"},
		{"tcp", bench.Upload, bench.OursWith(codec.CRC32C), bench.RawName(codec.CRC32, bench.ChunkBytes), 94, 0.94, "–", "–"},
		{"unix", bench.Upload, bench.OursWith(codec.CRC32C), bench.RawName(codec.CRC32C, bench.ChunkBytes), 90, 0.9, "at least 0.9: met", "–"},
		{"tcp", bench.Call, bench.Tensorferry, bench.StockGRPC, 50, 2, "at most 1.05: MISSED", "–"},
		{"unix", bench.Call, Steps, Plain, 100, 1, "at most 1.1: met", "–"},
		{"tcp", bench.Call, Compute, Plain, 80, 1.25, "–", "–"}, // of 1000 bytes
		{"tcp", bench.Call, bench.Tensorferry, bench.RawName(codec.CRC32C, bench.ChunkBytes), 80, 1.25, "–", "–"},
		{"tcp", measure.Pull, Folder, RawStored, 89, 0.89, "at least 0.9: MISSED", "–"},
		{"unix", measure.PullToFile, Folder, RawStored, 90, 0.9, "at least 0.9: met", "–"},
		{"tcp", measure.Push, InMemory, bench.RawName(codec.CRC32C, bench.ChunkBytes), 79, 0.79, "–", "–"},
		{"tcp", measure.Push, Folder, Copying, 90, 0.9, "at least 0.9: met", "–"},
	} {
		sample := func(d time.Duration) bench.Sample { return bench.Sample{Time: d, CPU: 2 * d, P99: 3 * d} }
		c := measure.Config{MinRounds: 1, MaxRounds: 1, Rules: Rules()}
		all, err := c.Rounds(t.Context(), measure.Comparison{Net: tc.net, Work: tc.work, Bytes: 1000},
			fixed(tc.who, sample(100)), fixed(tc.beside, sample(tc.theirs)))
		require.NoError(t, err)
		x := all[0]
		cost := 1 / tc.ratio
		if tc.work == bench.Call {
			cost = tc.ratio
		}
		require.InDelta(t, tc.ratio, x.Ratio.Median, 1e-9)
		require.InDelta(t, cost, x.Cost.Median, 1e-9)
		require.Equal(t, []string{tc.required, tc.and}, []string{x.Required.String(), x.RequiredCost.String()}, "%v", tc)
		require.Equal(t, measure.Figures{Time: 100, P99: 300, Rate: 10, CPU: 0.2}, x.Ours)
		c.Smoke = true
		all, err = c.Rounds(t.Context(), *x, fixed(tc.who, sample(100)), fixed(tc.beside, sample(tc.theirs)))
		require.NoError(t, err)
		require.Equal(t, x.Required, all[0].Required, "a smoke run judges nothing")
	}
	all, err := measure.Config{MinRounds: 1, MaxRounds: 1, Rules: Rules()}.Rounds(t.Context(), measure.Comparison{Net: "tcp", Work: measure.FirstResult, Bytes: 8},
		fixed(bench.Tensorferry, bench.Sample{Time: 6, Total: 100}))
	require.NoError(t, err)
	require.Equal(t, "at most 0.05: MISSED", all[0].Required.String())
}

func TestASmokeRunReportsEveryWorkOfTheSuite(t *testing.T) {
	c := briefly(t)
	r, err := c.Run(t.Context(), Suite([]string{"tcp"}, 2*bench.ChunkBytes))
	require.NoError(t, err)
	var text bytes.Buffer
	require.NoError(t, (&measure.Report{Smoke: true, Comparisons: r.Comparisons}).WriteText(&text))
	for _, want := range []string{
		"SMOKE RUN", "On this machine",
		"upload of 1 MiB", "relu of 1 MiB", "call of 30 KB", "first-result of 1 MiB", "call-beside-upload of 1 MiB", "pull-to-file of 1 MiB", "push of 1 MiB",
		"beside raw socket, CRC-32, 256 KiB", "beside " + Copying, TLS, "beside " + RawTLS(bench.SmallPiece), "beside " + StockTLS,
	} {
		require.Contains(t, text.String(), want)
	}
	again := new(measure.Report)
	data, err := json.Marshal(r)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(data, again))
	require.Equal(t, r, again)
}
