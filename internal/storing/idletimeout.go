package storing

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/serving"
	"github.com/tensorferry/tensorferry/stream"
)

// idleTimeout carries the frames of a transfer, with a clock that runs while this side
// waits for its peer. A frame that moves nothing does not reset the clock. A peer that says
// that it is waiting itself gets more time, but not without limit.
type idleTimeout struct {
	Conn
	kind  serving.Direction
	first time.Duration // initial time on the clock
	idle  time.Duration // time on the clock after a reset
	timer *time.Timer
	left  time.Duration // time left on the clock; belongs to the goroutine of the work
	most  time.Duration // since the last progress, whatever the peer says
	rest  time.Duration // what is left of most while waiting for frames; belongs to the same goroutine
	begun atomic.Bool   // the first frame has arrived
	spent atomic.Bool   // the transfer will end because of most, not of idle

	mu   sync.Mutex
	sent time.Time // since when a frame has been waiting to be read; zero if none is; guarded by mu
}

// newIdleTimeout returns an idleTimeout that calls expired when its clock has run down.
func newIdleTimeout(conn Conn, k serving.Direction, l stream.Limits, expired func()) *idleTimeout {
	t := &idleTimeout{Conn: conn, kind: k, first: time.Duration(l.FirstFrame), idle: time.Duration(l.ChunkIdle), most: time.Duration(l.InputIdle)}
	t.left, t.rest = t.first, t.most
	t.timer = time.AfterFunc(t.idle, expired)
	t.timer.Stop()
	return t
}

// Recv waits for the peer's next frame. The clock runs meanwhile.
func (t *idleTimeout) Recv() (*frame.Frame, error) {
	began := time.Now()
	t.timer.Reset(max(t.left, 0))
	f, err := t.Conn.Recv()
	t.timer.Stop()
	waited := time.Since(began)
	t.left -= waited
	t.rest -= waited
	switch {
	case !t.begun.Load():
		t.begun.Store(true)
		t.rewind()
	case err == nil && f.Empty(): // the peer waits for its own input
		t.left = min(t.idle, t.rest)
		t.spent.Store(t.rest <= t.idle)
	}
	return f, err
}

// Send waits until the peer has read. The clock runs meanwhile. The caller hands over held.
func (t *idleTimeout) Send(f *frame.Frame, held interface{ Release() }) error {
	return t.sending(func() error { return t.Conn.Send(f, held) })
}

// sending runs the clock while send waits for the peer.
func (t *idleTimeout) sending(send func() error) error {
	t.begin(time.Now())
	defer t.begin(time.Time{})
	return send()
}

// begin records since when a frame has been waiting to be read.
func (t *idleTimeout) begin(now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.sent = now; now.IsZero() {
		t.timer.Stop()
		return
	}
	t.spent.Store(false)
	t.timer.Reset(t.idle)
}

// waits gives a peer more time to read, after it has said that it waits for the consumer of
// its output. It is safe for concurrent use.
func (t *idleTimeout) waits() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.sent.IsZero() {
		return
	}
	if left := t.most - time.Since(t.sent); left > 0 {
		t.Conn.Excuse()
		t.spent.Store(left <= t.idle)
		t.timer.Reset(min(t.idle, left))
	}
}

// rewind resets the clock.
func (t *idleTimeout) rewind() {
	t.left, t.rest = t.idle, t.most
	t.spent.Store(false)
}

// err returns why the clock has run down.
func (t *idleTimeout) err() error {
	text := fmt.Sprintf("the client has not read for %v; pull again, and keep reading", t.idle)
	switch {
	case t.spent.Load() && t.kind == serving.Push:
		text = fmt.Sprintf("no chunk arrived for %v (serve --input-idle) while the client waited for its own input; push again when there is input", t.most)
	case t.spent.Load():
		text = fmt.Sprintf("the client has not read for %v (serve --input-idle) while it waited for the consumer of its output; pull again, and keep reading", t.most)
	case t.kind == serving.Push && !t.begun.Load():
		text = fmt.Sprintf("no frame arrived for %v; a push begins with a hello", t.first)
	case t.kind == serving.Push:
		text = fmt.Sprintf("no chunk arrived for %v, and the client did not say that it waits for its input; push again", t.idle)
	}
	return &frame.Error{Code: frame.DeadlineExceeded, Text: text}
}
