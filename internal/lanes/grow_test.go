package lanes

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/testkit"
)

// lanesAfter returns how many lanes growth has after looks at a line: its rate with so many of
// them since so many looks, and what else is seen.
func lanesAfter(looks, most int, line func(n, since int) look) (n int, why string) {
	g, since := new(growth), 0
	n = farLanes
	for range looks {
		want, said := g.next(line(n, since), n, most)
		if since++; want != n {
			n, since = want, 0
		}
		if said != "" {
			why = said
		}
	}
	return n, why
}

func TestLanesGrowAsFarAsTheyAreWorthIt(t *testing.T) {
	testkit.Start(t)
	const line = 125e6 // bytes per second
	each := func(rate float64) func(n, since int) look {
		return func(n, since int) look {
			rate := min(float64(n)*rate, line)
			if since == 0 {
				rate /= 2 // windows are opening
			}
			seen := look{rate: rate}
			if rate == line {
				seen.queue = 20 * time.Millisecond
			}
			return seen
		}
	}
	for name, tc := range map[string]struct {
		line func(n, since int) look
		want int
		why  string
	}{
		"the first ones fill the line": {each(line), farLanes, "full: packets wait 20ms"},
		"sixteen fill it":              {each(line / 16), 16, "full"},
		"all do not fill it":           {each(line / 100), 64, whyMost},
		"something else is slower": {func(n, _ int) look {
			return look{rate: min(line/3, float64(n)*line/20)}
		}, 8, "16 carried no more than 8"},
		// Slow start fills a line until some packets are lost: 16 of them hold it.
		"single packets get lost": {func(n, since int) look {
			if since > 2 && since < 8 {
				return look{rate: line, queue: 10 * time.Millisecond}
			}
			return each(line/16)(n, since)
		}, 16, "full"},
		// A queue of a fifth of a round trip: many packets are dropped at a time, and windows
		// then open for some seconds.
		"the queue is short": {func(_, since int) look {
			if since%25 == 1 {
				return look{rate: 0.9 * line, dropped: 7}
			}
			return look{rate: line * (0.55 + float64((since+23)%25)*0.015)}
		}, farLanes, "7 % were dropped"},
		"looks differ, and the line is full": {func(n, since int) look {
			return look{rate: line * (1 + 0.2*float64(since%2)), queue: time.Duration(since%3) * time.Millisecond}
		}, farLanes, "full"},
	} {
		t.Run(name, func(t *testing.T) {
			n, why := lanesAfter(200, 64, tc.line)
			require.Equal(t, tc.want, n, why)
			require.True(t, strings.Contains(why, tc.why), why)
		})
	}
}

func TestALastStepThatBringsNothingIsUndone(t *testing.T) {
	testkit.Start(t)
	n, why := lanesAfter(100, 12, func(int, int) look { return look{rate: 1e6} })
	require.Equal(t, farLanes, n)
	require.Equal(t, "12 carried no more than 8", why)
}

func TestAStepThatTheServerRefusesIsNotUndone(t *testing.T) {
	testkit.Start(t)
	g := new(growth)
	for range 20 {
		if n, why := g.next(look{rate: 1e6}, 4, 64); n < 4 || strings.Contains(why, "carried") {
			t.Fatalf("%d lanes: %s", n, why)
		}
	}
	require.True(t, g.enough)
}

// The rate of the source keeps changing, so steps must become rare.
func TestStepsInVainBecomeRare(t *testing.T) {
	testkit.Start(t)
	g, n, steps := new(growth), farLanes, 0
	for i := range 2000 {
		want, _ := g.next(look{rate: 1e6 * float64(1+i/10%2)}, n, 64)
		if want > n {
			steps++
		}
		n = want
	}
	require.Less(t, steps, 10)
}
