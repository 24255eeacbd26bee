package client

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// Session carries many calls concurrently.
type Session struct {
	client *Client
	sess   *session.Session
	own    context.Context    // of the gRPC stream
	cancel context.CancelFunc // of own
	opened chan struct{}
	over   chan struct{} // closed when nothing is left of the session
	err    *Error        // why it ended; set before over is closed

	draining atomic.Bool

	// Guarded by the session's lock.
	calls map[tensor.ID]*Call
	lane  laneState
	said  stream.Instant // when the client last told the server that it waits
}

// Session opens a session. ctx limits the opening, not the session's lifetime.
func (c *Client) Session(ctx context.Context) (*Session, error) {
	begin := time.Now()
	own, cancel := context.WithCancel(context.Background())
	s := &Session{client: c, own: own, cancel: cancel, opened: make(chan struct{}), over: make(chan struct{}), calls: make(map[tensor.ID]*Call)}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		cancel()
		return nil, &Error{Code: codes.Canceled, Cause: ErrClosed}
	}
	c.winding.Add(1)
	c.mu.Unlock()
	ctx, stop := context.WithTimeoutCause(ctx, c.cfg.OpenTimeout, c.noAnswer())
	defer stop()
	unhook := context.AfterFunc(ctx, cancel)
	defer unhook()
	rpc, err := c.stub.StreamTensors(own)
	if err != nil {
		c.winding.Done()
		cancel()
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, c.sessionError(err)
	}
	lanes := uint32(1)
	if c.noLanes() != "" {
		lanes = 0
	}
	s.sess = session.New(stream.Config{
		Session: session.NewID(), Check: c.cfg.Checksum, Codecs: c.codecs(),
		Lanes: lanes,
		Limits: stream.Limits{
			ChunkBytes:  uint32(c.cfg.ChunkBytes),
			TensorBytes: tensorBytes, // a streamed result may have any size
			SessionIdle: stream.Instant(365 * 24 * time.Hour),
			// A model may pause between two results: Request.Timeout limits a call,
			// and keep-alive finds a dead server.
			ChunkIdle:  stream.Instant(365 * 24 * time.Hour),
			FirstFrame: stream.Instant(c.cfg.OpenTimeout),
		},
	}, s)
	conn := wire.NewConn(rpc, nil)
	lost := s.sess.Carry(conn)
	c.mu.Lock()
	c.open[s] = struct{}{}
	if c.closed { // meanwhile
		s.sess.Stop(ErrClosed)
	}
	c.mu.Unlock()
	go s.windUp(conn, lost)
	select {
	case <-s.opened:
		if unhook() {
			s.carriedBy(rpc.Context(), time.Since(begin))
			return s, nil
		} // else ctx has just ended
	case <-s.sess.Stopped():
	case <-ctx.Done():
		s.sess.Stop(c.sessionError(context.Cause(ctx)))
	}
	<-s.over
	if ctx.Err() != nil {
		return nil, c.sessionError(context.Cause(ctx))
	}
	return nil, s.err
}

// codecs returns the codecs that the client's hellos list.
func (c *Client) codecs() []codec.Codec {
	if c.cfg.Codec == codec.None {
		return nil
	}
	return []codec.Codec{c.cfg.Codec}
}

// windUp ends the session with its connection, and cleans up after it.
func (s *Session) windUp(conn *wire.Conn, lost <-chan error) {
	defer s.client.winding.Done()
	select {
	case err := <-lost:
		s.sess.Stop(err)
	case <-s.sess.Stopped():
	}
	s.err = s.client.sessionError(s.sess.Cause())
	s.cancel()
	s.sess.Wait(frame.Code(s.err.Code), "the session has ended: "+s.err.Error())
	conn.Finish()
	s.client.mu.Lock()
	delete(s.client.open, s)
	s.client.mu.Unlock()
	close(s.over)
}

// Close ends the session, cancels its calls and waits for them.
func (s *Session) Close() error {
	s.sess.Stop(ErrClosed)
	<-s.over
	return nil
}

func (s *Session) usable() bool {
	select {
	case <-s.sess.Stopped():
		return false
	default:
		return !s.draining.Load()
	}
}

// Received implements session.Handler.
func (*Session) Received(*stream.Machine) {}

// Event runs with the session locked.
func (s *Session) Event(m *stream.Machine, now stream.Instant, e stream.Event) {
	switch e.Kind {
	case stream.EventOpened:
		close(s.opened)
	case stream.EventDrain:
		s.draining.Store(true)
	}
	c := s.calls[e.Call]
	if c == nil {
		return
	}
	switch e.Kind {
	case stream.EventTensor:
		c.announced(m, now, e)
		s.wantLane(m, int64(e.Desc.SizeBytes))
	case stream.EventChunk:
		c.arrived(e)
	case stream.EventClosed:
		delete(s.calls, e.Call)
		c.done, c.ended = *e.Done, true
		close(c.closed)
	}
}

// waits tells the server that the client waits for its own input or output, once for all
// inputs and outputs.
func (s *Session) waits(every time.Duration) {
	s.sess.Do(func(m *stream.Machine, now stream.Instant) {
		if s.said == 0 || now >= s.said+stream.Instant(every/2) {
			s.said = now
			m.Waits()
		}
	})
}

// Compute runs a model with one input and one result. It shares x until it returns; the
// result belongs to the caller.
func (s *Session) Compute(ctx context.Context, model string, x tensor.Tensor) (tensor.Tensor, error) {
	c, err := s.Call(ctx, Request{Model: model, Inputs: []Input{From("", x)}})
	if err != nil {
		return tensor.Tensor{}, err
	}
	results, err := c.Wait()
	if err != nil {
		return tensor.Tensor{}, err
	}
	if len(results) != 1 {
		return tensor.Tensor{}, fmt.Errorf("client: model %q has %d results; use Call", model, len(results))
	}
	for _, t := range results {
		return t, nil
	}
	panic("unreachable")
}

// Call starts a call and returns without waiting for it. Cancelling ctx cancels the call.
// Inputs are shared with the library until Wait has returned; the Request is copied. If the
// server does not read, Call may block for 30 s, after which the session ends.
func (s *Session) Call(ctx context.Context, r Request) (*Call, error) {
	c := &Call{session: s, id: session.NewID(), sinks: r.Results, to: r.To, closed: make(chan struct{}), news: make(chan struct{}, 1), letGo: make(chan struct{})}
	c.shared.Store(1)
	defer c.returned()
	part := frame.Call{ID: c.id, Model: r.Model, Params: r.Params, TimeoutMillis: millis(r.Timeout)}
	feeds := make([]feed, len(r.Inputs)) // not copied: goroutines run on them
	for i, in := range r.Inputs {
		size, err := in.check()
		if err != nil {
			return nil, err
		}
		feeds[i] = feed{call: c, in: in, id: session.NewID(), size: size}
		part.Inputs = append(part.Inputs, frame.Binding{Port: in.Port, Tensor: feeds[i].id})
	}
	for port, sink := range r.Results {
		if sink.at != nil {
			return nil, fmt.Errorf("%w: result %q: only Pull takes At; use Into or Writer", ErrInput, port)
		}
	}
	if ctx.Err() != nil {
		return nil, causeError(context.Cause(ctx))
	}
	var err error
	s.sess.DoSend(func(m *stream.Machine, now stream.Instant) {
		if err = m.OpenCall(now, part); err != nil {
			return
		}
		s.calls[c.id] = c
		for i := range feeds {
			if err = feeds[i].open(m, now); err != nil {
				m.Finish(frame.Done{Call: c.id, Code: frame.InvalidArgument, Message: err.Error()})
				return
			}
			s.wantLane(m, feeds[i].size)
		}
	})
	switch {
	case errors.Is(err, stream.ErrDraining):
		return nil, &Error{Code: codes.Unavailable, Cause: ErrDraining}
	case errors.Is(err, stream.ErrClosed):
		select {
		case <-s.over: // err is set by then
			return nil, s.err
		case <-ctx.Done():
			return nil, causeError(context.Cause(ctx))
		}
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrInput, err)
	}
	c.unhook = context.AfterFunc(ctx, func() { c.stop(context.Cause(ctx)) })
	for i := range feeds {
		if feeds[i].in.streamed() {
			c.feeding.Add(1)
			c.shared.Add(1)
			go feeds[i].run() // ends with its reader or its Next, or with the call
		}
	}
	return c, nil
}

// millis rounds up, so that a timeout never becomes 0, which is no limit.
func millis(d time.Duration) uint64 {
	return uint64((max(0, d) + time.Millisecond - 1) / time.Millisecond)
}
