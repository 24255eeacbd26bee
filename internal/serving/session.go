package serving

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/internal/failures"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

// Session is the server's side of one session: it turns the session's events into calls.
// Its fields are guarded by the session's lock.
type Session struct {
	*session.Session
	From      *admission.Caller // who opened it
	Holder    *slab.Principal   // for budgets, once it is open; its name is the session's ID and a unique number
	Values    context.Context   // of its RPC, such as the principal, from Serve on; it does not end
	core      *Core
	conn      Conn
	number    int64
	tasks     map[tensor.ID]Task
	sequences map[tensor.ID]*sequence
	kind      Direction     // of a one-way session; else empty
	allowance *slab.Account // for tensors on allowance
	promised  int64         // bytes of the budget for those
	retained  int           // bytes retained for calls, as last reported to conn
}

// Conn carries frames.
type Conn interface {
	session.Conn
	// Opened is called for each tensor that the peer has opened.
	Opened()
	// Take reports whether there is memory to retain so many bytes, in total, of what the
	// peer has said about calls.
	Take(bytes int64) bool
	// Comes reports whether the peer sends at least rate bytes a second, on average of about the
	// time over, and nobody waits for memory that they take. It is safe for concurrent use.
	Comes(rate float64, over time.Duration) bool
}

// Task serves one call, put or get.
type Task interface {
	// Event is told each event of the call, with the session locked.
	Event(m *stream.Machine, now stream.Instant, e stream.Event)
}

// OpenSession admits a session, which Serve then serves, or returns a *terms.RefusedError.
func (c *Core) OpenSession(from *admission.Caller) (*Session, error) {
	return c.session(from, "", stream.Config{Limits: c.Session, Stores: c.Tasks != nil})
}

// OpenOneWay admits a push or a pull by itself: a session with one call, whose client only
// sends, or only receives. At most so many of its tensors are open at a time.
func (c *Core) OpenOneWay(from *admission.Caller, kind Direction, tensors int) (*Session, error) {
	limits := c.Session
	limits.OpenTensors = min(limits.OpenTensors, tensors)
	return c.session(from, kind, stream.Config{Limits: limits, Stores: true, OneWay: true})
}

func (c *Core) session(from *admission.Caller, kind Direction, cfg stream.Config) (*Session, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.draining {
		return nil, errDraining
	}
	s := &Session{From: from, core: c, tasks: make(map[tensor.ID]Task), sequences: make(map[tensor.ID]*sequence), kind: kind}
	allowance := &cfg.Limits.AllowanceBytes
	if cfg.OneWay {
		if err := c.EnterTransfer(kind, from); err != nil {
			return nil, err
		}
		*allowance = 0
		c.oneWays.Add(1)
	} else {
		if err := c.Enter(admission.Sessions, from); err != nil {
			return nil, err
		}
		*allowance, s.promised = c.promise(*allowance, cfg.Limits.OpenTensors)
	}
	cfg.Server, cfg.StoredBytes, cfg.NoAllowance, cfg.Codecs = true, c.StoredBytes, *allowance == 0, codec.All()
	s.Session = session.New(cfg, s)
	c.sessions[s] = struct{}{}
	c.work.Add(1)
	s.number = c.number.Add(1)
	return s, nil
}

// promise returns how much of an allowance of most bytes a new session of limits is granted,
// and what is promised for that: each tensor takes whole pages. All sessions may use theirs
// at the same time, so when little is left, each gets a part of that, or nothing and must
// wait for credit. What is promised is kept apart from the budget, and nobody waits for it.
// mu is held.
func (c *Core) promise(most uint32, tensors int) (granted uint32, promised int64) {
	pages := slab.PagesOf(1) * int64(tensors)
	left := (c.Budget.Limit()/allowancesShare - c.promised) / promiseShare
	granted = uint32(min(int64(most), max(left-pages, 0)))
	if granted == 0 {
		return 0, 0
	}
	promised = int64(granted) + pages
	c.promised += promised
	return granted, promised
}

// OfferLanes offers a token that opens lanes, as many as times, and atOnce at a time. It must
// be called before Serve.
func (s *Session) OfferLanes(token frame.LaneToken, times, atOnce uint32) {
	s.Do(func(m *stream.Machine, _ stream.Instant) { m.OfferLanes(token, times, atOnce) })
}

// AddLane makes the session use a lane, which it takes over.
func (s *Session) AddLane(l session.Lane) {
	c := s.core
	c.lanes.Add(1)
	c.lanesOpened.Add(1)
	s.Session.AddLane(l, func(why error) {
		c.lanes.Add(-1)
		if s.Cause() != nil || errors.Is(why, session.ErrLaneClosed) { // or the session is about to end
			return
		}
		// The session continues without it.
		c.lanesBroken.Log(c.Log, slog.LevelInfo, "lane ended", "ended", slog.String("session", s.ID().String()), slog.String("cause", why.Error()))
	})
}

// Serve runs the session over conn until conn or ctx ends, then ends the session and
// returns why. The rest is cleaned up asynchronously: the session's goroutines end when
// conn has, which may be after the caller of Serve has returned.
func (s *Session) Serve(ctx context.Context, conn Conn) error {
	s.conn, s.Values = conn, context.WithoutCancel(ctx)
	s.Comes = func() bool {
		return conn.Comes(terms.LeastRate, time.Duration(s.core.Session.ChunkIdle)) && !s.core.Budget.Waited()
	}
	lost := s.Carry(conn)
	defer func() { // also when this function panics
		s.Stop(errors.New("serving: panic"))
		go func() {
			defer s.core.work.Done()
			s.Wait(s.core.Status(s.Cause()))
			s.leave()
		}()
	}()
	select {
	case <-s.Stopped():
	case err := <-lost:
		s.Stop(err)
	case <-ctx.Done():
		s.Stop(session.Why(ctx, lost))
	case <-s.core.Context().Done():
		s.Stop(failures.ErrShutdown)
	}
	return s.Cause()
}

// ErrServed ends a one-way session whose call needs nothing more.
var ErrServed = errors.New("serving: served")

// leave removes a session that has ended.
func (s *Session) leave() {
	s.endSequences()
	var st stream.Stats
	s.Do(func(m *stream.Machine, _ stream.Instant) { st = m.Status().Stats })
	c := s.core
	c.mu.Lock()
	defer c.mu.Unlock()
	c.promised -= s.promised // its calls are over
	delete(c.sessions, s)
	if c.past.Add(st); s.OneWay() {
		c.LeaveTransfer(s.kind, s.From)
	} else {
		c.Leave(admission.Sessions, s.From)
	}
}

// OneWay reports whether the session carries a push or a pull.
func (s *Session) OneWay() bool { return s.kind != "" }

// ID returns the session's ID; zero before its hello.
func (s *Session) ID() (id tensor.ID) {
	s.Do(func(m *stream.Machine, _ stream.Instant) { id = m.Status().Session })
	return id
}

// input is a tensor announced for a call. The session's lock guards it, except for what
// belongs to the call's goroutines once ready is closed.
type input struct {
	desc   frame.Desc
	geo    tensor.Geometry
	ready  chan struct{} // closed when a tensor on allowance is complete; nil for one on credit
	staged *slab.Slab    // memory in which a tensor on allowance waits; belongs to the call's goroutine after ready
	used   int64         // bytes of staged copied into blocks; call goroutine only
}

// whole reports whether a tensor on allowance is complete.
func (in *input) whole() bool {
	select {
	case <-in.ready:
		return true
	default:
		return false
	}
}

// Received tells the connection how much calls retain. The session is locked.
func (s *Session) Received(m *stream.Machine) {
	n := m.Retained()
	if n != s.retained && !s.conn.Take(int64(n)) {
		s.Stop(failures.TryLater(reason.Memory, "memory: not enough to keep what this session announces; announce less at a time, send larger chunks, or try again later"))
	}
	s.retained = n
}

// Event runs with the session locked.
func (s *Session) Event(m *stream.Machine, now stream.Instant, e stream.Event) {
	t := s.tasks[e.Call]
	switch e.Kind {
	case stream.EventOpened:
		name := fmt.Sprintf("%s/%d", m.Status().Session, s.number)
		s.Holder = slab.NewPrincipal(name)
		s.allowance = s.core.Budget.Account(slab.NewPrincipal(name + "/allowance").In(s.core.allowances))
		return
	case stream.EventReady:
		if e.Part.Stored() {
			if t := s.core.Tasks(s, m, now, e.Part); t != nil {
				s.tasks[e.Call] = t
			}
			return
		}
	case stream.EventTensor, stream.EventFailed: // before it began, or long after
		s.conn.Opened()
	case stream.EventClosed:
		delete(s.tasks, e.Call)
		if t == nil && !e.Part.Stored() {
			s.core.callEnded("", e.Code, 0)
		}
	}
	if t == nil && (e.Kind == stream.EventTensor || e.Kind == stream.EventReady) {
		t = &call{session: s, id: e.Call}
		s.tasks[e.Call] = t
	}
	if t != nil {
		t.Event(m, now, e)
	}
}

// Event implements Task.
func (c *call) Event(m *stream.Machine, now stream.Instant, e stream.Event) {
	core := c.session.core
	switch e.Kind {
	case stream.EventTensor:
		c.announced(m, now, e.Desc)
	case stream.EventReady:
		c.arrived, c.lastByte, c.model, c.part = now, now, e.Part.Model, e.Part
		c.ready(m)
	case stream.EventWhole:
		c.lastByte = now
		c.ready(m)
	case stream.EventStop:
		if c.cancel != nil {
			c.cancel(fmt.Errorf("%w: code %d: %s", errStopped, e.Code, e.Text))
		}
	case stream.EventClosed:
		c.session.Received(m)
		if c.cancel == nil { // it never started
			core.callEnded(c.model, e.Code, 0)
			c.release()
			return
		}
		core.callEnded(c.model, e.Code, max(time.Duration(now-c.arrived), 1))
		c.cancel(errStopped) // unless it has: who may have one call at a time may have the next
		core.Ending(admission.Calls, c.session.From)
		switch c.closed = true; {
		case c.idle && c.run == nil && c.sequence.stateless():
			c.session.After(c.leave)
		case c.idle: // a lane may still read a result, and a model's own code takes its time
			go c.leave()
		}
	}
}

// ready starts a call that is ready and has not begun. If all its inputs are single chunks that need no
// credit, it waits for the last of them, so that no goroutine has to: unless the call's time is limited, or
// it is a step, which takes its turn now. The session is locked.
func (c *call) ready(m *stream.Machine) {
	part, comes := c.part, false
	for _, in := range c.inputs {
		if in.ready == nil || in.geo.Count() > 1 {
			comes = false
			break
		}
		comes = comes || !in.whole()
	}
	if part == nil || comes && part.TimeoutMillis == 0 && part.Sequence == nil {
		return
	}
	c.part = nil
	core := c.session.core
	var err error
	if of := part.Sequence; of != nil && len(part.Inputs) > 0 {
		if c.sequence, err = c.session.step(of.ID); err == nil {
			c.model = c.sequence.name
		}
	}
	if err == nil {
		if err = core.Enter(admission.Calls, c.session.From); err != nil && c.sequence != nil {
			c.sequence.uses--
			c.sequence.answered(0)
		}
	}
	if err != nil {
		c.refuse(m, err)
		return
	}
	c.start(part)
}

// announced adds an input, and provides memory in which a small one waits.
func (c *call) announced(m *stream.Machine, now stream.Instant, d *frame.Desc) {
	in := &input{desc: *d, geo: tensor.Geometry{Size: int64(d.SizeBytes), ChunkBytes: int64(d.ChunkBytes)}}
	c.inputs = append(c.inputs, in)
	if !d.OnAllowance {
		return
	}
	in.ready = make(chan struct{})
	var err error
	if in.staged, err = c.session.Stage(in.geo); err != nil {
		c.refuse(m, err)
		return
	}
	if err := m.Lend(now, d.Tensor, in.staged.Bytes(), func(filled bool) {
		if filled {
			close(in.ready)
		}
	}); err != nil {
		in.staged.Release()
		in.staged = nil
	} else {
		m.Stay(now, d.Tensor, true)
	}
}

// Stage hands over memory in which a tensor on allowance waits. The error is a
// *terms.RefusedError, or the pool's.
func (s *Session) Stage(geo tensor.Geometry) (*slab.Slab, error) {
	n := slab.PagesOf(geo.Size)
	if !s.allowance.Take(n) { // it is promised: never
		return nil, failures.TryLater(reason.Memory, "memory: no %d bytes for a tensor on allowance, the budget of the server is %d; try again later, or wait for credit", n, s.core.Budget.Limit())
	}
	return s.allowance.Get(s.core.Pool, int(geo.Size), n)
}

// refuse ends a call that has not begun to compute; the session is locked.
func (c *call) refuse(m *stream.Machine, err error) {
	why := failures.ExplainCall(err)
	d := why.Done()
	d.Call, d.Refused = c.id, true
	m.Finish(d)
}
