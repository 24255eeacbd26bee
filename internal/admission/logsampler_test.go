package admission

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAFloodIsLoggedAsItsNumberDoubles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l LogSampler
		flood := func() (lines []int64) {
			for range 100_000 {
				if n, due := l.Again(); due {
					lines = append(lines, n)
				}
			}
			return lines
		}
		first := flood()
		require.Equal(t, []int64{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536}, first)
		time.Sleep(sampleEvery - time.Nanosecond)
		require.Equal(t, []int64{131072}, flood())
		time.Sleep(sampleEvery - time.Nanosecond)
		_, due := l.Again()
		require.False(t, due)
		time.Sleep(time.Nanosecond)
		n, due := l.Again()
		require.True(t, due, "one cause that goes on and on does not mute another for ever")
		require.EqualValues(t, 200_002, n)
		time.Sleep(sampleEvery)
		require.Equal(t, first, flood())
	})
}

func TestEachKindIsLoggedByItself(t *testing.T) {
	var all LogSamplers
	var text bytes.Buffer
	log := slog.New(slog.NewTextHandler(&text, nil))
	for range 3 { // the third time no line is due
		for i := range apart + 5 {
			all.Of(fmt.Sprint("reason ", i)).Log(log, slog.LevelInfo, "refused", "n", slog.String("why", fmt.Sprintf("%d.", i)))
		}
	}
	require.Equal(t, 2, strings.Count(text.String(), "why=0."))
	require.Equal(t, 2, strings.Count(text.String(), fmt.Sprintf("why=%d.", apart-1)))
	require.Less(t, strings.Count(text.String(), "\n"), 2*apart+5, "the rest are one")
}
