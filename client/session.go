package client

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
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
	calls map[tensor.ID]handler
	lane  laneState
	said  stream.Instant // when the client last told the server that it waits
}

// handler is a call, a put or a get.
type handler interface {
	// event handles an event of the call, with the session locked.
	event(m *stream.Machine, now stream.Instant, e stream.Event)
}

// Session opens a session. ctx limits the opening, not the session's lifetime.
func (c *Client) Session(ctx context.Context) (*Session, error) {
	begin := time.Now()
	lanes := uint32(1)
	if c.noLanes() != "" {
		lanes = 0
	}
	var rpc grpc.BidiStreamingClient[pb.Frame, pb.Frame]
	s, err := c.begin(ctx, stream.Config{Session: tensor.NewID(), Lanes: lanes}, func(own context.Context) (_ session.Conn, err error) {
		if rpc, err = c.stub.StreamTensors(own); err != nil {
			return nil, err
		}
		return wire.NewConn(rpc, nil), nil
	})
	if err == nil {
		s.carriedBy(rpc.Context(), time.Since(begin))
	}
	return s, err
}

// begin opens a session over what dial returns.
func (c *Client) begin(ctx context.Context, cfg stream.Config, dial func(own context.Context) (session.Conn, error)) (*Session, error) {
	own, cancel := context.WithCancel(context.Background())
	s := &Session{client: c, own: own, cancel: cancel, opened: make(chan struct{}), over: make(chan struct{}), calls: make(map[tensor.ID]handler)}
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
	conn, err := dial(own)
	if err != nil {
		c.winding.Done()
		cancel()
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, c.sessionError(err)
	}
	cfg.Check, cfg.Codecs = c.cfg.Checksum, c.codecs()
	cfg.Limits = stream.Limits{
		ChunkBytes:  uint32(c.cfg.ChunkBytes),
		TensorBytes: tensorBytes, // a streamed result may have any size
		SessionIdle: stream.Instant(365 * 24 * time.Hour),
		// A model may pause between two results: Request.Timeout limits a call, and
		// keep-alive finds a dead server.
		ChunkIdle:  stream.Instant(365 * 24 * time.Hour),
		FirstFrame: stream.Instant(c.cfg.OpenTimeout),
	}
	s.sess = session.New(cfg, s)
	lost := s.sess.Carry(conn)
	c.mu.Lock()
	c.open[s] = struct{}{}
	if c.closed { // meanwhile
		s.sess.Stop(ErrClosed)
	}
	c.mu.Unlock()
	go s.windUp(lost)
	select {
	case <-s.opened:
		if unhook() {
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
func (s *Session) windUp(lost <-chan error) {
	defer s.client.winding.Done()
	select {
	case err := <-lost:
		s.sess.Stop(err)
	case <-s.sess.Stopped():
	}
	s.err = s.client.sessionError(s.sess.Cause())
	s.cancel()
	s.sess.Wait(frame.Code(s.err.Code), "the session has ended: "+s.err.Error())
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
	if e.Kind == stream.EventClosed {
		delete(s.calls, e.Call)
	}
	c.event(m, now, e)
}

func (s *Session) status() (st stream.Status) {
	s.sess.Do(func(m *stream.Machine, _ stream.Instant) { st = m.Status() })
	return st
}

// stores reports whether the server's sessions have puts and gets.
func (s *Session) stores() bool { return s.status().PeerStores }

// open opens a put or a get.
func (s *Session) open(ctx context.Context, part frame.Call, h handler) (err error) {
	if ctx.Err() != nil {
		return causeError(context.Cause(ctx))
	}
	s.sess.DoSend(func(m *stream.Machine, now stream.Instant) {
		if err = m.OpenCall(now, part); err == nil {
			s.calls[part.ID] = h
		}
	})
	return s.openError(ctx, err)
}

// openError returns why a call could not be opened.
func (s *Session) openError(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, stream.ErrDraining):
		return &Error{Code: codes.Unavailable, Cause: ErrDraining}
	case errors.Is(err, stream.ErrClosed):
		select {
		case <-s.over: // err is set by then
			return s.err
		case <-ctx.Done():
			return causeError(context.Cause(ctx))
		}
	case err != nil:
		return fmt.Errorf("%w: %w", ErrInput, err)
	}
	return nil
}

// stop cancels a call with a cause on this side, which is kept unless it has one; the
// session is locked.
func (s *Session) stop(m *stream.Machine, call tensor.ID, kept *error, cause error) {
	if s.calls[call] != nil && *kept == nil {
		*kept = cause
	}
	m.Finish(frame.Done{Call: call, Code: frame.Cancelled, Message: "cancelled by the caller"})
}

// stalled returns the error of a put or a get that this side gave up, if it was for the
// server.
func (c *Client) stalled(e stream.Event) error {
	if e.Code != frame.Code(codes.DeadlineExceeded) {
		return nil
	}
	return &Error{Code: codes.DeadlineExceeded, Cause: fmt.Errorf("%w: the server made no progress for %v (Config.StallTimeout); try again, or raise it for a slow server", ErrNoAnswer, c.cfg.StallTimeout)}
}

// rests returns a clock for the caller's code of a call. While that blocks, the server is
// told; stop ends the call when it has blocked for too long.
func (s *Session) rests(what string, stop func(error), closed <-chan struct{}) (r *restClock) {
	cfg := &s.client.cfg
	idled := func(err error) {
		if cfg.Idled != nil {
			cfg.Idled(err)
		}
	}
	chunkIdle := time.Duration(s.status().PeerChunkIdle)
	r = newRestClock(what, cfg.InputIdle, chunkIdle, func() {
		select {
		case <-closed:
			r.end()
		default:
			s.waits(signEvery(chunkIdle))
		}
	}, func(cause error) {
		stop(cause)
		idled(causeError(cause))
	})
	return r
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
	c := &Call{session: s, id: tensor.NewID(), sinks: r.Results, to: r.To, closed: make(chan struct{}), news: make(chan struct{}, 1), letGo: make(chan struct{})}
	c.shared.Store(1)
	defer c.returned()
	part := frame.Call{ID: c.id, Model: r.Model, Params: r.Params, TimeoutMillis: millis(r.Timeout)}
	feeds := make([]feed, len(r.Inputs)) // not copied: goroutines run on them
	for i, in := range r.Inputs {
		size, err := in.check()
		if err != nil {
			return nil, err
		}
		feeds[i] = feed{call: c, in: in, id: tensor.NewID(), size: size}
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
	if err = s.openError(ctx, err); err != nil {
		return nil, err
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
