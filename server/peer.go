package server

import (
	"errors"
	"fmt"

	"github.com/tensorferry/tensorferry/assembler"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// peer is the server's side of one session: it turns the session's events into
// calls. Its fields are guarded by the session's lock.
type peer struct {
	server *Server
	conn   *connection
	paced  *paced
	sess   *session.Session
	number int64  // of the sessions of this server
	holder string // of budgets: the session's ID, which its client chose, and a number that no other has
	calls  map[tensor.ID]*call
	side   side // where tensors on allowance wait
}

// input is a tensor announced for a call. Guarded by the session's lock, but for
// what belongs to the call's goroutines once ready is closed.
type input struct {
	id     tensor.ID
	desc   tensor.Desc
	port   string
	chunk  int64
	chunks uint32
	size   int64
	ready  chan struct{} // closed when a tensor on allowance is whole; nil for one on credit
	staged *slab.Slab    // where a tensor on allowance waits; after ready, the call goroutine's
	used   int64         // bytes of staged copied into blocks; call goroutine only
	taken  int64         // bytes taken of the session's side; as staged
}

// Event runs with the session locked.
func (p *peer) Event(m *stream.Machine, now stream.Instant, e stream.Event) {
	switch e.Kind {
	case stream.EventOpened:
		p.holder = fmt.Sprintf("%s/%d", m.Session(), p.number)
		p.side.holder = p.holder
	case stream.EventTensor:
		p.announced(m, now, e)
	case stream.EventReady:
		p.ready(m, now, e)
	case stream.EventWhole:
		if c := p.calls[e.Call]; c != nil {
			c.lastByte = now
		}
	case stream.EventStop:
		if c := p.calls[e.Call]; c != nil && c.cancel != nil {
			c.cancel(stopCause(e))
		}
	case stream.EventClosed:
		c := p.calls[e.Call]
		if c == nil {
			p.server.callEnded("", e.Code, 0)
			return
		}
		delete(p.calls, e.Call)
		p.server.callEnded(c.model, e.Code, c.took(now))
		c.end()
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
	p.paced.opened.Add(1)
	if !e.Desc.OnAllowance {
		return
	}
	in.ready = make(chan struct{})
	n := slab.SizeOf(geo.Size) + int64(in.chunks)*assembler.ChunkOverhead
	if !p.side.take(n) {
		_, _, limit := p.server.cfg.Budget.Used()
		m.Finish(frame.Done{Call: c.id, Code: frame.ResourceExhausted, RetryAfterMillis: retryMillis, Message: fmt.Sprintf(
			"memory: no %d bytes for a tensor on allowance, the budget of the server is %d; try again later, or wait for credit", n, limit)})
		return
	}
	in.taken = n
	in.staged = p.server.cfg.Pool.Get(int(geo.Size))
	if err := m.Lend(now, in.id, in.staged.Bytes(), func(filled bool) {
		if filled {
			close(in.ready)
		}
	}); err != nil {
		p.unstage(in)
	}
}

// unstage gives back where a tensor on allowance waited; nothing touches it any
// more. What is kept per chunk stays to the call's end.
func (p *peer) unstage(in *input) {
	in.staged.Release()
	in.staged = nil
	n := slab.SizeOf(in.size)
	in.taken -= n
	p.side.give(n)
}

// settle gives back all that waits on the side for an input.
func (p *peer) settle(in *input) {
	if in.staged != nil {
		p.unstage(in)
	}
	p.side.give(in.taken)
	in.taken = 0
}

// ready starts a call whose inputs are all announced.
func (p *peer) ready(m *stream.Machine, now stream.Instant, e stream.Event) {
	s := p.server
	c := p.call(e.Call)
	c.arrived, c.lastByte, c.model = now, now, e.Part.Model
	if !s.beginCall(p.conn) {
		m.Finish(frame.Done{Call: c.id, Code: frame.ResourceExhausted, RetryAfterMillis: retryMillis,
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
