package server

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/stream"
)

// watched is the gRPC stream of a transfer, with a clock that runs while this side
// waits for its peer. A frame that moves nothing does not set it back.
type watched struct {
	*paced
	kind  kind
	first time.Duration // what the clock begins with
	idle  time.Duration // what it is set back to
	timer *time.Timer
	left  time.Duration // on the clock; belongs to the goroutine of the work
	begun atomic.Bool   // the first frame has come
}

// newWatched returns a stream that calls stalled when its clock has run down.
func newWatched(conn *paced, k kind, l stream.Limits, stalled func()) *watched {
	w := &watched{paced: conn, kind: k, first: time.Duration(l.FirstFrame), idle: time.Duration(l.ChunkIdle)}
	w.left = w.first
	w.timer = time.AfterFunc(w.idle, stalled)
	w.timer.Stop()
	return w
}

// RecvMsg waits for the peer's next frame until the clock has run down.
func (w *watched) RecvMsg(m any) error {
	began := time.Now()
	w.timer.Reset(max(w.left, 0))
	err := w.paced.RecvMsg(m)
	w.timer.Stop()
	if w.left -= time.Since(began); !w.begun.Load() {
		w.begun.Store(true)
		w.rewind()
	}
	return err
}

// SendMsg waits until the peer has read, or the clock has run down.
func (w *watched) SendMsg(m any) error {
	w.timer.Reset(w.idle)
	err := w.paced.SendMsg(m)
	w.timer.Stop()
	return err
}

// rewind sets the clock back.
func (w *watched) rewind() { w.left = w.idle }

// stalled says why the clock has run down.
func (w *watched) stalled() error {
	text := fmt.Sprintf("the client has not read for %v; pull again, and read what comes", w.idle)
	switch {
	case w.kind == pushTransfer && !w.begun.Load():
		text = fmt.Sprintf("no frame came for %v; a push opens with hello", w.first)
	case w.kind == pushTransfer:
		text = fmt.Sprintf("no chunk came for %v; push again, in smaller chunks if the network is slow", w.idle)
	}
	return &frame.Error{Code: frame.DeadlineExceeded, Text: text}
}
