// Package calling carries the calls, puts and gets of a client's session. It refuses what the
// caller's own limits do not allow, and repeats nothing.
//
// Inputs are shared until their call or put has ended, and memory of a Sink is lent until then.
// Each call, put and get belongs to one goroutine, but for Stop.
package calling

import (
	"time"

	"github.com/tensorferry/tensorferry/internal/lanes"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// Config of what runs on a session.
type Config struct {
	Pool *slab.Pool // for what is read ahead, and staged
	// ResultBytes is the largest result that gets memory of its own.
	ResultBytes int64
	// StallTimeout is how long a put or a get waits for a server that makes no progress,
	// InputIdle how long the caller's code may block; 0 is no limit.
	StallTimeout, InputIdle time.Duration
	// Idled is called when something fails while the caller's code blocks.
	Idled func(error)
	// Attempt is called before a call, put or get is opened, and what it returns at its end.
	Attempt func() (ended func(Outcome), err error)
}

// Outcome is the end of a call, put or get.
type Outcome struct {
	Err            error
	Total, Server  time.Duration // how long it took, and how long the server says
	Sent, Received int64         // bytes of tensors
}

// Session is a session of a client.
type Session struct {
	*session.Session
	Lanes  *lanes.Lanes  // set before anything is opened
	Opened chan struct{} // closed when the server has said hello
	Over   chan struct{} // closed, by the owner, when nothing is left of the session
	Err    *Error        // why it ended; set before it is over
	cfg    Config

	// Guarded by the session's lock.
	open map[tensor.ID]handler
	told stream.Instant // when the client last told the server that it waits
}

// New returns a session, which Carry begins.
func New(of stream.Config, cfg Config) *Session {
	s := &Session{Opened: make(chan struct{}), Over: make(chan struct{}), cfg: cfg, open: make(map[tensor.ID]handler)}
	s.Session = session.New(of, s)
	return s
}

// handler is a call, a put or a get.
type handler interface {
	// event handles an event of the call, with the session locked.
	event(m *stream.Machine, now stream.Instant, e stream.Event)
	// over handles those of its end, likewise.
	over(e stream.Event)
}

// Received implements session.Handler.
func (s *Session) Received(*stream.Machine) {}

// Event runs with the session locked.
func (s *Session) Event(m *stream.Machine, now stream.Instant, e stream.Event) {
	if e.Kind == stream.EventOpened {
		close(s.Opened)
	}
	if c := s.open[e.Call]; c != nil {
		c.event(m, now, e)
		c.over(e)
	}
}

// Status returns the state of the session.
func (s *Session) Status() (st stream.Status) {
	s.Do(func(m *stream.Machine, _ stream.Instant) { st = m.Status() })
	return st
}

// waits tells the server that the client waits for its own input or output, once for all
// inputs and outputs.
func (s *Session) waits(every time.Duration) {
	s.Do(func(m *stream.Machine, now stream.Instant) {
		if s.told == 0 || now >= s.told+stream.Instant(every/2) {
			s.told = now
			m.Waits()
		}
	})
}

// stage lends memory for a tensor on allowance; without any, the tensor fails. The session is
// locked.
func (s *Session) stage(m *stream.Machine, now stream.Instant, l *session.Landing) {
	if mem, err := s.cfg.Pool.Get(int(l.Geo.Size)); err == nil {
		l.Stage(m, now, mem)
	}
}

// patience is how long a put or a get waits for a server that reads or syncs bytes.
func (s *Session) patience(bytes int64) stream.Instant {
	return stream.Instant(s.cfg.StallTimeout) + stream.Instant(bytes/silentRate)*stream.Instant(time.Second)
}
