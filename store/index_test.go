package store

import (
	"context"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAListEndsAmidAPageWhenItsReaderHasGone(t *testing.T) {
	ctx, end := context.WithCancelCause(t.Context())
	err := eachMatch(ctx, "*a", "", func(string, string) ([]string, error) {
		end(errStopped)
		return []string{"a", "b"}, nil // the last ones
	}, func(string) bool { return true })
	require.ErrorIs(t, err, errStopped)
}

func TestAsManyListsLookAtNamesAtATimeAsThereIsRoom(t *testing.T) {
	const more = 5
	room := max(1, runtime.GOMAXPROCS(0)-1)
	var looking, most atomic.Int64
	begun := make(chan struct{}, room+more)
	goOn := make(chan struct{})
	ended := make(chan error, room+more)
	for range room + more {
		go func() {
			err := eachMatch(t.Context(), "", "", func(string, string) ([]string, error) {
				n := looking.Add(1)
				defer looking.Add(-1)
				for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
				}
				begun <- struct{}{}
				<-goOn
				return nil, nil
			}, nil)
			ended <- err
		}()
	}
	for range room {
		<-begun
	}
	ctx, end := context.WithCancelCause(t.Context())
	waiting := make(chan error, 1)
	go func() {
		err := eachMatch(ctx, "", "", func(string, string) ([]string, error) { return nil, errStopped }, nil)
		waiting <- err
	}()
	end(context.DeadlineExceeded)
	require.ErrorIs(t, <-waiting, context.DeadlineExceeded, "who waits for room may leave")
	close(goOn)
	for range room + more {
		require.NoError(t, <-ended)
	}
	require.EqualValues(t, room, most.Load())
}
