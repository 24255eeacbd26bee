package serving

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"

	"github.com/tensorferry/tensorferry/assembler"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// Session is the server's side of one session: it turns the session's events into calls.
// Its fields are guarded by the session's lock.
type Session struct {
	core    *Core
	from    *Caller
	sess    *session.Session
	conn    Conn
	ctx     context.Context // ends with the session
	cancel  context.CancelFunc
	number  int64
	holder  *slab.Principal // for budgets; its name is the session's ID and a unique number
	calls   map[tensor.ID]*call
	staging staging
	// promised is the allowance that the session's hello grants.
	promised uint32
	retained int // bytes retained for calls, as last reported to conn
}

// Conn carries frames.
type Conn interface {
	session.Conn
	// Opened is called for each tensor that the peer has opened.
	Opened()
	// Holds is called with the number of bytes retained of what the peer has said about
	// calls.
	Holds(bytes int64)
}

// OpenSession admits a session, which Serve then serves, or returns a *RefusedError.
func (c *Core) OpenSession(from *Caller) (*Session, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.draining {
		return nil, errDraining
	}
	if err := c.Enter(Sessions, from); err != nil {
		return nil, err
	}
	limits := c.cfg.Session
	limits.AllowanceBytes = c.reservations.promise(c.cfg.Budget, limits.AllowanceBytes)
	s := &Session{
		core: c, from: from, calls: make(map[tensor.ID]*call), promised: limits.AllowanceBytes,
		staging: staging{budget: c.cfg.Budget, reserved: reservation(limits.AllowanceBytes), all: &c.reservations},
	}
	s.sess = session.New(stream.Config{Server: true, Limits: limits, NoAllowance: limits.AllowanceBytes == 0, Codecs: codec.All()}, s)
	s.ctx, s.cancel = context.WithCancel(context.Background())
	c.sessions[s] = struct{}{}
	c.work.Add(1)
	s.number = c.number.Add(1)
	return s, nil
}

// OfferLanes offers a token that opens lanes, as many as times. It must be called before
// Serve.
func (s *Session) OfferLanes(token frame.LaneToken, times uint32) {
	s.sess.Do(func(m *stream.Machine, _ stream.Instant) { m.OfferLanes(token, times) })
}

// AddLane makes the session use a lane, which it takes over.
func (s *Session) AddLane(l session.Lane) {
	c := s.core
	c.lanes.Add(1)
	c.lanesOpened.Add(1)
	s.sess.AddLane(l, func(why error) {
		c.lanes.Add(-1)
		select {
		case <-s.sess.Stopped():
		default: // the session continues without it, or is about to end
			if errors.Is(why, io.EOF) {
				return
			}
			if n, due := c.lanesBroken.Again(); due {
				c.log.Info("lane ended", slog.String("session", s.ID().String()), slog.String("cause", why.Error()), slog.Int64("ended", n))
			}
		}
	})
}

// Serve runs the session over conn until conn or ctx ends, then ends the session and
// returns why. The rest is cleaned up asynchronously: the session's goroutines end when
// conn has, which may be after the caller of Serve has returned.
func (s *Session) Serve(ctx context.Context, conn Conn) error {
	s.conn = conn
	lost := s.sess.Carry(conn)
	defer func() { // also when this function panics
		s.sess.Stop(errors.New("serving: panic"))
		s.cancel()
		go func() {
			defer s.core.work.Done()
			s.sess.Wait(frame.Unavailable, "session ended")
			s.leave()
		}()
	}()
	select {
	case <-s.sess.Stopped():
	case err := <-lost:
		s.sess.Stop(err)
	case <-ctx.Done():
		s.sess.Stop(context.Cause(ctx))
	case <-s.core.Done():
		s.sess.Stop(ErrShutdown)
	}
	return s.sess.Cause()
}

// leave removes a session that has ended.
func (s *Session) leave() {
	var st stream.Stats
	s.sess.Do(func(m *stream.Machine, _ stream.Instant) { st = m.Status().Stats })
	s.staging.close() // its calls are over
	s.core.reservations.unpromise(s.promised)
	c := s.core
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.sessions, s)
	c.Leave(Sessions, s.from)
	c.past.Add(st)
}

// ID returns the session's ID; zero before its hello.
func (s *Session) ID() (id tensor.ID) {
	s.sess.Do(func(m *stream.Machine, _ stream.Instant) { id = m.Status().Session })
	return id
}

// input is a tensor announced for a call. The session's lock guards it, except for what
// belongs to the call's goroutines once ready is closed.
type input struct {
	id       tensor.ID
	desc     tensor.Desc
	port     string
	name     string // chosen by the client
	metadata map[string]string
	chunk    int64
	chunks   uint32
	size     int64
	ready    chan struct{} // closed when a tensor on allowance is complete; nil for one on credit
	staged   *slab.Slab    // memory in which a tensor on allowance waits; belongs to the call's goroutine after ready
	used     int64         // bytes of staged copied into blocks; call goroutine only
	taken    int64         // bytes taken from the session's staging; guarded as staged
}

// Received tells the connection how much calls retain. The session is locked.
func (s *Session) Received(m *stream.Machine) {
	if n := m.Retained(); n != s.retained {
		s.retained = n
		s.conn.Holds(int64(n))
	}
}

// Event runs with the session locked.
func (s *Session) Event(m *stream.Machine, now stream.Instant, e stream.Event) {
	c := s.calls[e.Call]
	switch e.Kind {
	case stream.EventOpened:
		name := fmt.Sprintf("%s/%d", m.Status().Session, s.number)
		s.holder = slab.NewPrincipal(name)
		s.staging.holder, s.staging.reserver = s.holder, slab.NewPrincipal(name+"/allowance")
	case stream.EventTensor:
		s.announced(m, now, e)
	case stream.EventReady:
		s.ready(m, now, e)
	case stream.EventWhole:
		if c != nil {
			c.lastByte = now
		}
	case stream.EventStop:
		if c != nil && c.cancel != nil {
			c.cancel(fmt.Errorf("%w: code %d: %s", errStopped, e.Code, e.Text))
		}
	case stream.EventClosed:
		if c == nil {
			s.core.callEnded("", e.Code, 0)
			return
		}
		delete(s.calls, e.Call)
		s.Received(m)
		s.core.callEnded(c.model, e.Code, c.took(now))
		c.end()
	}
}

// call returns the call with an ID, which it creates if needed.
func (s *Session) call(id tensor.ID) *call {
	c := s.calls[id]
	if c == nil {
		c = &call{session: s, id: id, closed: make(chan struct{})}
		s.calls[id] = c
	}
	return c
}

// announced adds an input to its call, and provides memory in which a small one waits.
func (s *Session) announced(m *stream.Machine, now stream.Instant, e stream.Event) {
	c := s.call(e.Call)
	geo := tensor.Geometry{Size: int64(e.Desc.SizeBytes), ChunkBytes: int64(e.Desc.ChunkBytes)}
	in := &input{
		id: e.Tensor, desc: e.Desc.Desc, port: e.Desc.Port, name: e.Desc.Name, metadata: e.Desc.Metadata,
		chunk: geo.ChunkBytes, chunks: geo.Count(), size: geo.Size,
	}
	c.inputs = append(c.inputs, in)
	s.conn.Opened()
	if !e.Desc.OnAllowance {
		return
	}
	in.ready = make(chan struct{})
	n := slab.SizeOf(geo.Size) + int64(in.chunks)*assembler.ChunkOverhead
	if !s.staging.take(n) {
		_, _, limit := s.core.cfg.Budget.Used()
		c.refuse(m, TryLater(frame.ResourceExhausted, "memory: no %d bytes for a tensor on allowance, the budget of the server is %d; try again later, or wait for credit", n, limit))
		return
	}
	in.taken = n
	var err error
	if in.staged, err = s.core.cfg.Pool.Get(int(geo.Size)); err != nil {
		c.refuse(m, err)
		return
	}
	if err := m.Lend(now, in.id, in.staged.Bytes(), func(filled bool) {
		if filled {
			close(in.ready)
		}
	}); err != nil {
		s.unstage(in)
	}
}

// unstage releases the memory in which a tensor on allowance waited, which nothing uses any
// more. Its chunk table stays until the call ends.
func (s *Session) unstage(in *input) {
	in.staged.Release()
	in.staged = nil
	n := slab.SizeOf(in.size)
	in.taken -= n
	s.staging.give(n)
}

// settle returns everything that an input has in the staging.
func (s *Session) settle(in *input) {
	if in.staged != nil {
		s.unstage(in)
	}
	s.staging.give(in.taken)
	in.taken = 0
}

// ready starts a call, all of whose inputs are announced.
func (s *Session) ready(m *stream.Machine, now stream.Instant, e stream.Event) {
	c := s.call(e.Call)
	c.arrived, c.lastByte, c.model = now, now, e.Part.Model
	if err := s.core.Enter(Calls, s.from); err != nil {
		c.refuse(m, err)
		return
	}
	c.start(e.Part)
}

// logFailure logs what the caller of a failed call is not told.
func (c *Core) logFailure(session string, call tensor.ID, err error) {
	if n, due := c.failures.Again(); due {
		c.log.Error("call failed", slog.String("session", session), slog.String("call", call.String()), slog.String("error", err.Error()), slog.Int64("failures", n))
	}
}

// refuse ends a call that has not begun to compute; the session is locked.
func (c *call) refuse(m *stream.Machine, err error) {
	why := ExplainCall(err)
	m.Finish(frame.Done{Call: c.id, Code: why.Code, Message: why.Text, RetryAfterMillis: why.RetryMillis})
}
