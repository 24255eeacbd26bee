package calling

import (
	"cmp"
	"fmt"
	"math"
	"sync"
	"time"
)

// restClock runs while the caller's own code does: a Reader, a Next or a Writer. While that
// code blocks, the clock periodically tells the server that the client is alive and waiting.
type restClock struct {
	limit time.Duration
	sign  func()        // tells the server, on the timer's goroutine
	every time.Duration // how often sign is called
	over  func(error)   // called once, when the caller's code has blocked for longer than limit

	mu         sync.Mutex
	kind, name string    // what blocks; guarded by mu, as all below
	since      time.Time // when the caller's code was called; zero: it is not running
	ended      bool
	timer      *time.Timer
}

// newRestClock returns a stopped clock for a server with this idle timeout; 0 means unknown. A
// limit of 0 is none.
func newRestClock(kind, name string, limit, chunkIdle time.Duration, sign func(), over func(error)) *restClock {
	c := &restClock{limit: cmp.Or(limit, math.MaxInt64), sign: sign, every: mostSign, over: over, kind: kind, name: name}
	if chunkIdle > 0 {
		c.every = min(max(chunkIdle/signs, leastSign), mostSign)
	}
	c.timer = time.AfterFunc(time.Hour, c.tick)
	c.timer.Stop()
	return c
}

// start is called before the caller's code, stop after it.
func (c *restClock) start() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.ended {
		c.since = time.Now()
		c.timer.Reset(min(c.every, c.limit))
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

// of names the tensor that blocks from now on.
func (c *restClock) of(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.kind, c.name = "tensor", name
}

func (c *restClock) tick() {
	c.mu.Lock()
	runs, what := !c.since.IsZero(), "the "+c.kind
	if c.name != "" {
		what = fmt.Sprintf("%s %q", c.kind, c.name)
	}
	over := runs && time.Since(c.since) >= c.limit
	c.ended = c.ended || over
	c.mu.Unlock()
	switch {
	case over:
		c.over(fmt.Errorf("%w: nothing from or for %s in %v", Causes.InputIdle, what, c.limit))
		return
	case !runs:
		return
	}
	c.sign()
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.since.IsZero() {
		c.timer.Reset(min(c.every, max(0, c.limit-time.Since(c.since))))
	}
}
