package admission

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestACallerThatFloodsTheServerStarvesOnlyItself(t *testing.T) {
	for limit, most := range map[int]int{1: 1, 2: 2, 3: 3, 5: 4, 7: 6, 8: 6, 10: 8, 1024: 768} { // of one caller
		for k := range Kinds {
			g := Gates{Limits: [Kinds]int{limit, limit, limit, limit}}
			var flood, other Caller
			for range most {
				require.True(t, g.Enter(k, &flood), limit)
			}
			require.False(t, g.Enter(k, &flood), limit)
			for range min(limit-most, ownOpen) { // another has some all the same
				require.True(t, g.Enter(k, &other), limit)
			}
			if limit-most <= ownOpen {
				require.False(t, g.Enter(k, new(Caller)), "the limit is a limit")
			} else {
				require.False(t, g.Enter(k, &other), "these are for others")
			}
			open, refused := g.Count(k)
			require.EqualValues(t, most+min(limit-most, ownOpen), open)
			require.EqualValues(t, 2, refused)
			g.Leave(k, &flood)
			require.Equal(t, limit-most <= ownOpen && most <= ownOpen, g.Enter(k, &flood), limit)
		}
	}
}

func TestNoMoreIsOpenThanTheLimitWhoeverAsks(t *testing.T) {
	const limit, callers = 8, 5
	g := Gates{Limits: [Kinds]int{Calls: limit}}
	var all sync.WaitGroup
	for range callers {
		all.Go(func() {
			var from Caller
			for range 2000 {
				if g.Enter(Calls, &from) {
					if n, _ := g.Count(Calls); n > limit+callers { // each may be counted while it is refused
						t.Errorf("%d are open", n)
					}
					g.Leave(Calls, &from)
				}
			}
		})
	}
	all.Wait()
	open, _ := g.Count(Calls)
	require.Zero(t, open)
}

func TestWhatIsEndingTakesNoPlaceButIsBounded(t *testing.T) {
	for limit, most := range map[int]int{1: ownOpen, 8: 8} {
		g := Gates{Limits: [Kinds]int{Calls: limit}}
		var from Caller
		for range most + 1 {
			require.True(t, g.Enter(Calls, &from))
			g.Ending(Calls, &from)
		}
		require.False(t, g.Enter(Calls, &from))
		g.Ended(Calls)
		require.True(t, g.Enter(Calls, &from))
		open, _ := g.Count(Calls)
		require.EqualValues(t, 1, open)
	}
}
