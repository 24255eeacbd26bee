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

// idleTimeout is the frames of a transfer, with a clock that runs while this side waits
// for its peer. A frame that moves nothing does not set it back; a peer that says that it
// waits itself has more time, but not without end.
type idleTimeout struct {
	Conn
	kind  serving.Direction
	first time.Duration // what the clock begins with
	idle  time.Duration // what it is set back to
	timer *time.Timer
	left  time.Duration // on the clock; belongs to the goroutine of the work
	most  time.Duration // from the last move on, whatever the peer says
	rest  time.Duration // left of most while frames are waited for; belongs to the work
	begun atomic.Bool   // the first frame has come
	spent atomic.Bool   // most is about to end the transfer

	mu   sync.Mutex
	sent time.Time // since when a frame waits to be read; zero: none does; guarded by mu
}

// newIdleTimeout returns frames that call expired when their clock has run down.
func newIdleTimeout(conn Conn, k serving.Direction, l stream.Limits, expired func()) *idleTimeout {
	t := &idleTimeout{Conn: conn, kind: k, first: time.Duration(l.FirstFrame), idle: time.Duration(l.ChunkIdle), most: time.Duration(l.InputIdle)}
	t.left, t.rest = t.first, t.most
	t.timer = time.AfterFunc(t.idle, expired)
	t.timer.Stop()
	return t
}

// Recv waits for the peer's next frame until the clock has run down.
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

// Send waits until the peer has read, or the clock has run down. It takes held over.
func (t *idleTimeout) Send(f *frame.Frame, held interface{ Release() }) error {
	return t.sending(func() error { return t.Conn.Send(f, held) })
}

// sending runs the clock while send waits for the peer.
func (t *idleTimeout) sending(send func() error) error {
	t.begin(time.Now())
	defer t.begin(time.Time{})
	return send()
}

// begin notes since when a frame waits to be read.
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

// waits gives a peer more time to read, who has said that it waits for whoever takes its
// output. It is safe for concurrent use.
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

// rewind sets the clock back.
func (t *idleTimeout) rewind() {
	t.left, t.rest = t.idle, t.most
	t.spent.Store(false)
}

// err says why the clock has run down.
func (t *idleTimeout) err() error {
	text := fmt.Sprintf("the client has not read for %v; pull again, and read what comes", t.idle)
	switch {
	case t.spent.Load() && t.kind == serving.Push:
		text = fmt.Sprintf("no chunk came for %v (serve --input-idle), and the client waits for its own input; push again when there is some", t.most)
	case t.spent.Load():
		text = fmt.Sprintf("the client has not read for %v (serve --input-idle), and waits for whoever takes its output; pull again, and take what comes", t.most)
	case t.kind == serving.Push && !t.begun.Load():
		text = fmt.Sprintf("no frame came for %v; a push opens with hello", t.first)
	case t.kind == serving.Push:
		text = fmt.Sprintf("no chunk came for %v, nor a word that the client waits for its input; push again", t.idle)
	}
	return &frame.Error{Code: frame.DeadlineExceeded, Text: text}
}
