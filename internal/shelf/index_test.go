package shelf

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/store"
)

var errStopped = errors.New("stopped")

// watched is a tensor of which somebody hears when it is listed.
type watched func()

func (w watched) About() *store.Info {
	w()
	return &store.Info{}
}

// indexOf has tensors a and b, with the lock held while listed runs.
func indexOf(listed func()) *Index[watched] {
	x := new(Index[watched])
	x.Reset(map[string]watched{"a": listed, "b": listed})
	return x
}

func TestAListEndsAmidAPageWhenItsReaderHasGone(t *testing.T) {
	ctx, end := context.WithCancelCause(t.Context())
	listed := 0
	_, err := indexOf(func() { listed++; end(errStopped) }).List(ctx, "*", "", 10)
	require.ErrorIs(t, err, errStopped)
	require.Equal(t, 1, listed)
}

func TestAsManyListsLookAtNamesAtATimeAsThereIsRoom(t *testing.T) {
	const more = 5
	room := max(1, runtime.GOMAXPROCS(0)-1)
	var looking, most atomic.Int64
	begun := make(chan struct{}, 2*(room+more))
	goOn := make(chan struct{})
	ended := make(chan error, room+more)
	for range room + more {
		go func() {
			_, err := indexOf(func() {
				n := looking.Add(1)
				defer looking.Add(-1)
				for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
				}
				begun <- struct{}{}
				<-goOn
			}).List(t.Context(), "", "", 10)
			ended <- err
		}()
	}
	for range room {
		testkit.Receive(t, begun)
	}
	ctx, end := context.WithCancelCause(t.Context())
	waiting := make(chan error, 1)
	go func() {
		_, err := indexOf(func() {}).List(ctx, "", "", 10)
		waiting <- err
	}()
	end(context.DeadlineExceeded)
	require.ErrorIs(t, testkit.Receive(t, waiting), context.DeadlineExceeded, "who waits for room may leave")
	close(goOn)
	for range room + more {
		require.NoError(t, testkit.Receive(t, ended))
	}
	require.EqualValues(t, room, most.Load())
}

type value struct{ info store.Info }

func (v *value) About() *store.Info { return &v.info }

func TestTheNamesOfTheLastSetsAreTold(t *testing.T) {
	var x Index[*value]
	x.Reset(map[string]*value{})
	add := func(names ...string) {
		var list []*value
		for _, name := range names {
			list = append(list, &value{store.Info{Name: name}})
		}
		x.Put(list...)
	}
	expect := func(after int64, want ...string) {
		t.Helper()
		names, _, known := x.Changed(after)
		require.True(t, known)
		slices.Sort(names)
		slices.Sort(want)
		require.True(t, slices.Equal(want, names), "after %d", after)
	}
	add("a", "b")
	_, middle, _ := x.Changed(math.MaxInt64)
	add("c")
	x.Drop("b")
	add("c", "d")
	expect(0, "a", "b", "c", "d")
	expect(middle, "c", "d")
	expect(math.MaxInt64)
	var many []string
	for i := range store.MaxSet {
		many = append(many, fmt.Sprint("many", i))
	}
	add(many...)
	expect(middle, append([]string{"c", "d"}, many...)...)
	for n := int64(2); n <= 4; n++ {
		add(many...)
		_, now, known := x.Changed(math.MaxInt64)
		require.Equal(t, n*store.MaxSet+4, now)
		require.True(t, known)
		expect(now-store.MaxSet, many...)
		_, _, known = x.Changed(middle)
		require.False(t, known)
		require.LessOrEqual(t, len(x.sets), 2*store.MaxSet)
	}
}
