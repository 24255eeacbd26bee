package server

import (
	"errors"
	"fmt"

	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// peer is the server's side of one session: it turns the session's events into
// calls. Its fields are guarded by the session's lock.
type peer struct {
	server *Server
	sess   *session.Session
	holder string // of budgets; the session's ID
	calls  map[tensor.ID]*call
	staged bool // the session's allowance is taken from the budget
}

// input is a tensor announced for a call. Guarded by the session's lock, but for
// ready and, after it, staged.
type input struct {
	id     tensor.ID
	desc   tensor.Desc
	port   string
	chunk  int64
	chunks uint32
	size   int64
	staged *slab.Slab    // where a tensor on allowance waits
	used   int64         // bytes of staged copied into blocks; call goroutine only
	ready  chan struct{} // closed when a staged tensor is whole
	base   int           // sequence number of the block that its region 0 is
	lent   bool          // base is set
}

// Event runs with the session locked.
func (p *peer) Event(m *stream.Machine, now stream.Instant, e stream.Event) {
	switch e.Kind {
	case stream.EventOpened:
		p.holder = m.Session().String()
	case stream.EventTensor:
		p.announced(m, now, e)
	case stream.EventReady:
		p.ready(m, now, e)
	case stream.EventRegion:
		if c := p.calls[e.Call]; c != nil {
			c.regionFull(e.Tensor, int(e.N))
		}
	case stream.EventWhole:
		if c := p.calls[e.Call]; c != nil {
			c.lastByte = now
			if in := c.input(e.Tensor); in != nil && in.staged != nil {
				close(in.ready)
			}
		}
	case stream.EventStop:
		if c := p.calls[e.Call]; c != nil && c.cancel != nil {
			c.cancel(stopCause(e))
		}
	case stream.EventClosed:
		p.server.count(e.Code)
		if c := p.calls[e.Call]; c != nil {
			delete(p.calls, e.Call)
			c.end()
		}
	}
}

// errStopped is the cause of a call's context when the machine has ended it;
// done is decided by then, so no text of it reaches anyone.
var errStopped = errors.New("server: call stopped")

func stopCause(e stream.Event) error {
	return fmt.Errorf("%w: code %d: %s", errStopped, e.Code, e.Text)
}

func (p *peer) call(id tensor.ID) *call {
	c := p.calls[id]
	if c == nil {
		c = &call{peer: p, id: id, closed: make(chan struct{})}
		p.calls[id] = c
	}
	return c
}

// announced notes an input, and gives a small one its waiting place.
func (p *peer) announced(m *stream.Machine, now stream.Instant, e stream.Event) {
	c := p.call(e.Call)
	geo := tensor.Geometry{Size: int64(e.Desc.SizeBytes), ChunkBytes: int64(e.Desc.ChunkBytes)}
	in := &input{
		id: e.Tensor, desc: e.Desc.Desc, port: e.Desc.Port,
		chunk: geo.ChunkBytes, chunks: geo.Count(), size: geo.Size,
	}
	c.inputs = append(c.inputs, in)
	if !e.Desc.OnAllowance {
		return
	}
	if !p.staged {
		// The whole allowance, once: what is promised in hello is accounted for.
		n := int64(p.server.limits.AllowanceBytes)
		if !p.server.cfg.Budget.TryAcquire(p.holder, n) {
			_, _, limit := p.server.cfg.Budget.Used()
			m.Finish(stream.Done{Call: c.id, Code: stream.ResourceExhausted, RetryAfterMillis: retryMillis, Message: fmt.Sprintf(
				"memory: no %d bytes for the session's allowance, the budget of the server is %d; try again later", n, limit)})
			return
		}
		p.staged = true
	}
	in.staged = p.server.cfg.Pool.Get(int(geo.Size))
	in.ready = make(chan struct{})
	if _, err := m.Lend(now, in.id, in.staged.Bytes()); err != nil {
		in.staged.Release()
		in.staged = nil
	}
}

// ready starts a call whose inputs are all announced.
func (p *peer) ready(m *stream.Machine, now stream.Instant, e stream.Event) {
	s := p.server
	c := p.call(e.Call)
	c.arrived, c.lastByte = now, now
	if n := s.calls.Add(1); n > int64(s.cfg.QueuedCalls) {
		s.calls.Add(-1)
		m.Finish(stream.Done{Call: c.id, Code: stream.ResourceExhausted, RetryAfterMillis: retryMillis,
			Message: fmt.Sprintf("calls: the limit of the server is %d; try again later", s.cfg.QueuedCalls)})
		return
	}
	c.start(e.Part)
}

// name is the session's ID for logs.
func (p *peer) name() string {
	var id tensor.ID
	p.sess.Do(func(m *stream.Machine, _ stream.Instant) { id = m.Session() })
	return id.String()
}

// close gives the session's share of the budget back; its calls are over.
func (p *peer) close() {
	if p.staged {
		p.server.cfg.Budget.Release(p.holder, int64(p.server.limits.AllowanceBytes))
	}
}
