package client

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net"
	"net/url"
	"time"

	"google.golang.org/grpc/peer"

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
	// idempotent has the models that declare to be, where calls are repeated.
	idempotent map[string]bool

	// Guarded by the session's lock.
	calls map[tensor.ID]handler
	lanes lanes
	said  stream.Instant // when the client last told the server that it waits
}

// handler is a call, a put or a get.
type handler interface {
	// event handles an event of the call, with the session locked.
	event(m *stream.Machine, now stream.Instant, e stream.Event)
	// over handles those of its end, likewise.
	over(e stream.Event)
}

// Session opens a session. ctx limits the opening, not the session's lifetime.
func (c *Client) Session(ctx context.Context) (s *Session, err error) {
	settled, err := c.attempt()
	if err != nil {
		return nil, err
	}
	defer func() { settled(err) }()
	begin := time.Now()
	own, cancel := context.WithCancel(context.Background())
	s = &Session{client: c, own: own, cancel: cancel, opened: make(chan struct{}), over: make(chan struct{}), calls: make(map[tensor.ID]handler)}
	s.lanes.busy = make(chan struct{}, 1)
	ctx, stop := context.WithTimeoutCause(ctx, c.cfg.Wait+c.cfg.OpenTimeout, c.noAnswer())
	defer stop()
	unhook := context.AfterFunc(ctx, cancel)
	defer unhook()
	rpc, err := c.stub.StreamTensors(own)
	c.mu.Lock()
	if err = cmp.Or(context.Cause(c.closing), context.Cause(ctx), err); err != nil {
		c.mu.Unlock()
		cancel()
		return nil, c.sessionError(err)
	}
	s.sess = session.New(c.sessionConfig(), events{s})
	lost := s.sess.Carry(wire.NewConn(rpc, nil))
	c.winding.Go(func() { s.windUp(lost) }) // Close waits for it
	c.mu.Unlock()
	select {
	case <-s.opened:
		if unhook() {
			s.lanes.address, s.lanes.wait = c.address(rpc.Context()), laneWait+time.Since(begin)
			return s, nil
		} // else ctx has just ended
	case <-s.sess.Stopped():
	case <-ctx.Done():
		s.sess.Stop(c.sessionError(context.Cause(ctx)))
	}
	<-s.over
	return nil, c.sessionError(cmp.Or(context.Cause(ctx), error(s.err)))
}

// sessionConfig returns the configuration of a new session.
func (c *Client) sessionConfig() stream.Config {
	lanes := uint32(max(0, c.cfg.Lanes))
	cfg := stream.Config{Session: tensor.NewID(), Lanes: lanes, LanesAtOnce: lanes, Check: c.cfg.Checksum, Limits: stream.Limits{
		ChunkBytes:  uint32(c.cfg.ChunkBytes),
		TensorBytes: tensorBytes, // a streamed result may have any size
		SessionIdle: stream.Instant(365 * 24 * time.Hour),
		// A model may pause between two results: Request.Timeout limits a call, and
		// keep-alive finds a dead server.
		ChunkIdle:  stream.Instant(365 * 24 * time.Hour),
		FirstFrame: stream.Instant(c.cfg.OpenTimeout),
	}}
	if c.cfg.Codec != codec.None {
		cfg.Codecs = []codec.Codec{c.cfg.Codec}
	}
	return cfg
}

// address returns the address of the server of a session, or nil if gRPC has lost the
// connection.
func (c *Client) address(rpc context.Context) net.Addr {
	// The address of a Unix socket is the path that the server bound, which may name
	// nothing here: the server may run in another folder or container.
	if u, err := url.Parse(c.target); err == nil && u.Scheme == "unix" {
		return &net.UnixAddr{Net: u.Scheme, Name: cmp.Or(u.Path, u.Opaque)} // as gRPC reads it
	}
	if p, ok := peer.FromContext(rpc); ok {
		return p.Addr
	}
	return nil
}

// windUp ends the session with its connection or its client, and cleans up after it.
func (s *Session) windUp(lost <-chan error) {
	closing := s.client.closing
	select {
	case err := <-lost:
		s.sess.Stop(cmp.Or(context.Cause(closing), err))
	case <-closing.Done():
		s.sess.Stop(ErrClosed)
	case <-s.sess.Stopped():
	}
	s.err = s.client.sessionError(s.sess.Cause())
	s.cancel()
	s.sess.Wait(frame.Code(s.err.Code), "the session has ended: "+s.err.Error())
	close(s.over)
}

// Close ends the session, cancels its calls and waits for them.
func (s *Session) Close() error {
	s.sess.Stop(ErrClosed)
	<-s.over
	return nil
}

// events are a Session as its machine sees it.
type events struct{ *Session }

// Received implements session.Handler.
func (events) Received(*stream.Machine) {}

// Event runs with the session locked.
func (s events) Event(m *stream.Machine, now stream.Instant, e stream.Event) {
	if e.Kind == stream.EventOpened {
		close(s.opened)
	}
	if c := s.calls[e.Call]; c != nil {
		c.event(m, now, e)
		c.over(e)
	}
}

func (s *Session) status() (st stream.Status) {
	s.sess.Do(func(m *stream.Machine, _ stream.Instant) { st = m.Status() })
	return st
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

// Compute is like Client.Compute, on this session. It shares x until it returns.
func (s *Session) Compute(ctx context.Context, model string, x tensor.Tensor, params ...map[string]string) (tensor.Tensor, error) {
	return compute(ctx, s.Call, model, x, params)
}

// compute has call run a model of one input and one result.
func compute(ctx context.Context, call func(context.Context, Request) (*Call, error), model string, x tensor.Tensor, params []map[string]string) (tensor.Tensor, error) {
	r := Request{Model: model, Inputs: []Input{From("", x)}}
	if len(params) > 0 {
		r.Params = make(map[string]string)
		for _, p := range params {
			maps.Copy(r.Params, p)
		}
	}
	c, err := call(ctx, r)
	if err != nil {
		return tensor.Tensor{}, err
	}
	results, err := c.Wait()
	if err != nil {
		return tensor.Tensor{}, err
	}
	for _, t := range results {
		if len(results) == 1 {
			return t, nil
		}
	}
	return tensor.Tensor{}, fmt.Errorf("client: model %q has %d results; use Call", model, len(results))
}

// Call starts a call and returns without waiting for it. Cancelling ctx cancels the call.
// Inputs are shared with the library until Wait has returned; the Request is copied. If the
// server does not read, Call may block for 30 s, after which the session ends. The call is
// not repeated: Client.Call's are.
func (s *Session) Call(ctx context.Context, r Request) (*Call, error) {
	s.client.tally.calls.Add(1)
	return newCall(s.run(ctx, r))
}

// run starts an attempt at a call.
func (s *Session) run(ctx context.Context, r Request) (*run, error) {
	c := &run{sinks: r.Results, to: r.To}
	timeout := (max(0, r.Timeout) + time.Millisecond - 1) / time.Millisecond // never rounded to 0, which is no limit
	part := frame.Call{ID: tensor.NewID(), Model: r.Model, Params: r.Params, TimeoutMillis: uint64(timeout)}
	feeds := make([]feed, len(r.Inputs)) // not copied: goroutines run on them
	for i, in := range r.Inputs {
		if _, err := in.check(); err != nil {
			return nil, err
		}
		feeds[i] = feed{call: c, in: in, id: tensor.NewID()}
		part.Inputs = append(part.Inputs, frame.Binding{Port: in.Port, Tensor: feeds[i].id})
	}
	for port, sink := range r.Results {
		if sink.at != nil {
			return nil, fmt.Errorf("%w: result %q: only Pull takes At; use Into or Writer", ErrInput, port)
		}
	}
	err := c.open(ctx, s, part, c, func(m *stream.Machine, now stream.Instant) error {
		for i := range feeds {
			if err := feeds[i].open(m, now); err != nil {
				m.Finish(frame.Done{Call: c.id, Code: frame.InvalidArgument, Message: err.Error()})
				return err
			}
			c.sent += feeds[i].geo.Size
			s.wantLane(m, feeds[i].geo.Size)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for i := range feeds {
		if feeds[i].in.streamed() {
			c.using.Go(feeds[i].run) // ends with its reader or its Next, or with the call
		}
	}
	return c, nil
}
