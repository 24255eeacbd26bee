package storing

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/serving"
	"github.com/tensorferry/tensorferry/stream"
)

// idleTimeout is the frames of a transfer, with a clock that runs while this side waits
// for its peer. A frame that moves nothing does not set it back.
type idleTimeout struct {
	Conn
	kind  serving.Direction
	first time.Duration // what the clock begins with
	idle  time.Duration // what it is set back to
	timer *time.Timer
	left  time.Duration // on the clock; belongs to the goroutine of the work
	begun atomic.Bool   // the first frame has come
}

// newIdleTimeout returns frames that call expired when their clock has run down.
func newIdleTimeout(conn Conn, k serving.Direction, l stream.Limits, expired func()) *idleTimeout {
	t := &idleTimeout{Conn: conn, kind: k, first: time.Duration(l.FirstFrame), idle: time.Duration(l.ChunkIdle)}
	t.left = t.first
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
	if t.left -= time.Since(began); !t.begun.Load() {
		t.begun.Store(true)
		t.rewind()
	}
	return f, err
}

// Send waits until the peer has read, or the clock has run down. It takes held over.
func (t *idleTimeout) Send(f *frame.Frame, held interface{ Release() }) error {
	return t.sending(func() error { return t.Conn.Send(f, held) })
}

// sending runs the clock while send waits for the peer.
func (t *idleTimeout) sending(send func() error) error {
	t.timer.Reset(t.idle)
	defer t.timer.Stop()
	return send()
}

// rewind sets the clock back.
func (t *idleTimeout) rewind() { t.left = t.idle }

// err says why the clock has run down.
func (t *idleTimeout) err() error {
	text := fmt.Sprintf("the client has not read for %v; pull again, and read what comes", t.idle)
	switch {
	case t.kind == serving.Push && !t.begun.Load():
		text = fmt.Sprintf("no frame came for %v; a push opens with hello", t.first)
	case t.kind == serving.Push:
		text = fmt.Sprintf("no chunk came for %v; push again, in smaller chunks if the network is slow", t.idle)
	}
	return &frame.Error{Code: frame.DeadlineExceeded, Text: text}
}
