package background

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

var errGone = errors.New("gone")

// alone gives a test turns of its own, n at a time.
func alone(t *testing.T, n int) {
	before := turns
	turns = make(chan struct{}, n)
	t.Cleanup(func() { turns = before })
}

func TestATurnGoesRoundWhenItsTimeIsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alone(t, 1)
		const each = 5
		var order []int
		done := make(chan struct{})
		for i := range 3 {
			go func() {
				defer func() { done <- struct{}{} }()
				var turn Turn
				defer turn.End()
				time.Sleep(time.Duration(i)) // one after the other
				for range each {
					for range 2 { // half a turn each
						if err := turn.Work(t.Context()); err != nil {
							t.Error(err)
						}
						time.Sleep(turnTime / 2)
					}
					order = append(order, i)
				}
			}()
		}
		for range 3 {
			<-done
		}
		for at, i := range order {
			if i != at%3 {
				t.Fatalf("turns were taken in the order %v", order)
			}
		}
	})
}

func TestWhoWaitsForATurnMayLeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alone(t, 1)
		var has, waits Turn
		if err := has.Work(t.Context()); err != nil {
			t.Fatal(err)
		}
		ctx, leave := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Minute, func() { leave(errGone) })
		if err := waits.Work(ctx); !errors.Is(err, errGone) {
			t.Errorf("got %v, want that it left", err)
		}
		waits.End()
		has.End()
		has.End()
		if len(turns) != 0 {
			t.Errorf("%d turns are still taken", len(turns))
		}
	})
}
