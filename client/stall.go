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

// stallClock is the connection of a push or a pull that ends when its server stalls. It
// runs while the server is waited for, not while the caller's own code runs, and starts
// anew only when something has moved: frames that move nothing do not keep a transfer
// alive. It belongs to one goroutine.
type stallClock struct {
	*wire.Conn
	limit, left time.Duration
	since       time.Time
	timer       *time.Timer

	rest    *restClock // while the server is not waited for; nil: there is none
	sending sync.Mutex // held to send
}

// newStallClock returns a stopped clock. It ends an RPC by cancel.
func newStallClock(limit time.Duration, cancel context.CancelCauseFunc) *stallClock {
	stalled := &Error{Code: codes.DeadlineExceeded, Cause: fmt.Errorf("%w: the server moved nothing for %v (Config.StallTimeout); try it again, or raise it for a server that is slow", ErrNoAnswer, limit)}
	c := &stallClock{limit: limit, left: limit, timer: time.AfterFunc(limit, func() { cancel(stalled) })}
	c.timer.Stop()
	return c
}

// allow gives the server more time, for bytes that it goes through in silence.
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

// moved begins the time anew.
func (c *stallClock) moved() { c.left = c.limit }

// Send waits for room. It takes held over.
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
		_ = c.Conn.Send(new(frame.Frame), nil) // how it fails the next Send tells
	}
}

// quiet runs f once nothing is sent any more.
func (c *stallClock) quiet(f func() error) error {
	c.rest.end()
	c.sending.Lock()
	defer c.sending.Unlock()
	return f()
}

// Recv waits for a frame. The caller says whether it moved something.
func (c *stallClock) Recv() (*frame.Frame, error) {
	c.wait()
	defer c.stop()
	return c.Conn.Recv()
}
