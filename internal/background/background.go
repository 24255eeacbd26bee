// Package background gives turns to work that a peer can ask for cheaply and that takes
// long, such as hashing what it says it holds, or generating a tensor: all of it in the
// process together leaves a core to those whose calls are computed.
//
// It refuses to compute. A Turn belongs to one goroutine; turns are taken first come,
// first served. It owns no bytes.
package background

import (
	"context"
	"runtime"
	"time"
)

// turns has a token for each turn that is taken.
var turns = make(chan struct{}, max(1, runtime.GOMAXPROCS(0)-1))

// Turn is a place among those that work. The zero value is none.
type Turn struct{ since time.Time }

// Work takes the turn, unless it is taken, or waits for another when it has lasted
// for turnTime. When ctx ends first it returns the cause, and the turn has ended.
func (t *Turn) Work(ctx context.Context) error {
	if !t.since.IsZero() && time.Since(t.since) < turnTime {
		return nil
	}
	t.End()
	select {
	case turns <- struct{}{}:
		t.since = time.Now()
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// End ends the turn, if it is taken. Whoever waits for a peer, or for a disk to write,
// ends it before.
func (t *Turn) End() {
	if !t.since.IsZero() {
		t.since = time.Time{}
		<-turns
	}
}

// Pieces calls step for each piece of so many bytes, in turns unless there is only one. When ctx
// ends first it returns the cause.
func Pieces(ctx context.Context, bytes int, step func(from, to int)) error {
	var turn Turn
	defer turn.End()
	for at := 0; at < bytes; at += PieceBytes {
		if bytes > PieceBytes {
			if err := turn.Work(ctx); err != nil {
				return err
			}
		}
		step(at, min(at+PieceBytes, bytes))
	}
	return nil
}
