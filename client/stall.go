package client

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/wire"
)

// stallClock is the connection of a push or a pull. It cancels the RPC when the server
// stalls. It runs while the client waits for the server, not while the caller's own code
// runs, and starts again only when something has moved: frames that move nothing do not
// keep a transfer alive. It belongs to one goroutine.
type stallClock struct {
	*wire.Conn
	limit, left time.Duration
	since       time.Time
	timer       *time.Timer

	rest    *restClock // runs while this clock does not; may be nil
	sending sync.Mutex // held to send
}

// newStallClock returns a stopped clock. It ends an RPC by calling cancel.
func newStallClock(limit time.Duration, cancel context.CancelCauseFunc) *stallClock {
	stalled := &Error{Code: codes.DeadlineExceeded, Cause: fmt.Errorf("%w: the server made no progress for %v (Config.StallTimeout); try again, or raise it for a slow server", ErrNoAnswer, limit)}
	c := &stallClock{limit: limit, left: limit, timer: time.AfterFunc(limit, func() { cancel(stalled) })}
	c.timer.Stop()
	return c
}

// allow gives the server more time, for bytes that it processes without sending anything.
func (c *stallClock) allow(bytes int64) {
	more := time.Duration(bytes/silentRate) * time.Second
	c.limit += more
	c.left += more
}

func (c *stallClock) wait() {
	c.rest.stop()
	c.since = time.Now()
	c.timer.Reset(c.left)
}

func (c *stallClock) stop() {
	c.timer.Stop()
	c.left -= time.Since(c.since)
	c.rest.start()
}

// moved restarts the limit.
func (c *stallClock) moved() { c.left = c.limit }

// Send waits for room. The caller hands over held.
func (c *stallClock) Send(f *frame.Frame, held interface{ Release() }) error {
	c.wait()
	c.sending.Lock()
	err := c.Conn.Send(f, held)
	c.sending.Unlock()
	c.stop()
	if err == nil {
		c.moved()
	}
	return err
}

// waits tells the server of a push that the client waits for its own input.
func (c *stallClock) waits() {
	c.sending.Lock()
	defer c.sending.Unlock()
	if c.rest.running() {
		_ = c.Conn.Send(new(frame.Frame), nil) // the next Send returns the error
	}
}

// quiet ends the rest clock and runs f while nothing is being sent.
func (c *stallClock) quiet(f func() error) error {
	c.rest.end()
	c.sending.Lock()
	defer c.sending.Unlock()
	return f()
}

// Recv waits for a frame. The caller calls moved if the frame moved something.
func (c *stallClock) Recv() (*frame.Frame, error) {
	c.wait()
	defer c.stop()
	return c.Conn.Recv()
}
