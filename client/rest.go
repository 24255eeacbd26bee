package client

import (
	"fmt"
	"sync"
	"time"
)

// restClock runs while the caller's own code does: a Reader, a Next or a Writer. While that
// code blocks, the clock periodically tells the server that the client is alive and
// waiting.
type restClock struct {
	limit time.Duration // 0: none
	sign  func()        // tells the server, on the timer's goroutine
	every time.Duration // how often sign is called
	over  func(error)   // called once, when the caller's code has blocked for longer than limit

	mu    sync.Mutex
	what  string    // what blocks; guarded by mu, as all below
	since time.Time // when the caller's code was called; zero: it is not running
	ended bool
	timer *time.Timer
}

// newRestClock returns a stopped clock.
func newRestClock(what string, limit, chunkIdle time.Duration, sign func(), over func(error)) *restClock {
	c := &restClock{limit: limit, sign: sign, over: over, what: what, every: signEvery(chunkIdle)}
	c.timer = time.AfterFunc(time.Hour, c.tick)
	c.timer.Stop()
	return c
}

// signEvery returns how often to tell a server with this idle timeout; 0 means unknown.
func signEvery(chunkIdle time.Duration) time.Duration {
	if chunkIdle <= 0 {
		return mostSign
	}
	return min(max(chunkIdle/signs, leastSign), mostSign)
}

// named returns how an error text names an input or a result. The name may be empty.
func named(kind, name string) string {
	if name == "" {
		return "the " + kind
	}
	return fmt.Sprintf("%s %q", kind, name)
}

// start is called before the caller's code, stop after it.
func (c *restClock) start() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.ended {
		c.since = time.Now()
		c.again()
	}
}

func (c *restClock) stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.since = time.Time{}
	c.timer.Stop()
}

// end stops the clock for good.
func (c *restClock) end() {
	c.stop()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
}

// of sets what blocks from now on.
func (c *restClock) of(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.what = what
}

// again sets the timer; mu is held.
func (c *restClock) again() {
	next := c.every
	if c.limit > 0 {
		next = min(next, max(0, c.limit-time.Since(c.since)))
	}
	c.timer.Reset(next)
}

func (c *restClock) tick() {
	c.mu.Lock()
	runs, what := !c.since.IsZero(), c.what
	over := runs && c.limit > 0 && time.Since(c.since) >= c.limit
	c.ended = c.ended || over
	c.mu.Unlock()
	switch {
	case over:
		c.over(fmt.Errorf("%w: nothing from or for %s in %v", ErrInputIdle, what, c.limit))
		return
	case !runs:
		return
	}
	c.sign()
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.since.IsZero() {
		c.again()
	}
}
