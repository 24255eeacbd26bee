package admission

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestACallerThatFloodsTheServerStarvesOnlyItself(t *testing.T) {
	const limit = 10
	for k := range Kinds {
		g := Gates{Limits: [Kinds]int{limit, limit, limit}}
		var flood, other Caller
		for range limit {
			require.True(t, g.Enter(k, &flood))
		}
		require.False(t, g.Enter(k, &flood))
		for range ownOpen { // another has some all the same
			require.True(t, g.Enter(k, &other))
		}
		require.False(t, g.Enter(k, &other))
		for range ownOpen {
			g.Leave(k, &other)
		}
		g.Leave(k, &flood)
		require.True(t, g.Enter(k, &flood), "what was left may be opened again")
		open, refused := g.Count(k)
		require.EqualValues(t, limit, open)
		require.EqualValues(t, 2, refused)
	}
}

func TestNoMoreIsOpenThanTheLimitAndTheOwnOnesWhoeverAsks(t *testing.T) {
	const limit, callers = 8, 5
	g := Gates{Limits: [Kinds]int{Calls: limit}}
	var all sync.WaitGroup
	for range callers {
		all.Go(func() {
			var from Caller
			for range 2000 {
				if g.Enter(Calls, &from) {
					if n, _ := g.Count(Calls); n > limit+callers*ownOpen {
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
