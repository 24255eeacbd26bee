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
	"github.com/tensorferry/tensorferry/internal/calling"
	"github.com/tensorferry/tensorferry/internal/lanes"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// Session carries many calls concurrently.
type Session struct {
	client *Client
	on     *calling.Session
	cancel context.CancelFunc // of the gRPC stream
	// idempotent has the models that declare to be, where calls are repeated.
	idempotent map[string]bool
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
	s = &Session{client: c, cancel: cancel, on: calling.New(c.sessionConfig(), calling.Config{
		Pool: c.pool, ResultBytes: c.cfg.ResultBytes, StallTimeout: c.cfg.StallTimeout, InputIdle: c.cfg.InputIdle,
		Idled: c.cfg.Idled, Attempt: c.attemptTask,
	})}
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
	lost := s.on.Carry(wire.NewConn(rpc, nil))
	c.winding.Go(func() { s.windUp(lost) }) // Close waits for it
	c.mu.Unlock()
	select {
	case <-s.on.Opened:
		if unhook() {
			s.on.Lanes = lanes.New(lanes.Config{
				Session: s.on.Session, Most: c.cfg.Lanes, Fixed: c.cfg.FixedLanes, FarChunk: c.cfg.farChunk, Known: &c.lanes,
				Address: c.address(rpc.Context()), Dial: c.dialLane, Opening: time.Since(begin), Go: c.winding.Go, Context: own,
			})
			return s, nil
		} // else ctx has just ended
	case <-s.on.Stopped():
	case <-ctx.Done():
		s.on.Stop(c.sessionError(context.Cause(ctx)))
	}
	<-s.on.Over
	return nil, c.sessionError(cmp.Or(context.Cause(ctx), error(s.on.Err)))
}

// sessionConfig returns the configuration of a new session.
func (c *Client) sessionConfig() stream.Config {
	most := uint32(max(0, c.cfg.Lanes))
	cfg := stream.Config{Session: tensor.NewID(), Lanes: most, LanesAtOnce: most, Check: c.cfg.Checksum, Limits: stream.Limits{
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
		s.on.Stop(cmp.Or(context.Cause(closing), err))
	case <-closing.Done():
		s.on.Stop(ErrClosed)
	case <-s.on.Stopped():
	}
	err := s.client.sessionError(s.on.Cause())
	s.on.Err = err
	s.cancel()
	s.on.Wait(frame.Code(err.Code), "the session has ended: "+err.Error())
	close(s.on.Over)
}

// Close ends the session, cancels its calls and waits for them.
func (s *Session) Close() error {
	s.on.Stop(ErrClosed)
	<-s.on.Over
	return nil
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
	return started(s.on.Call(ctx, r))
}

// started returns the Call of an attempt that is not repeated.
func started(first *calling.Call, err error) (*Call, error) {
	if err != nil {
		return nil, err
	}
	c := &Call{cancel: func(error) {}}
	c.now.Store(first)
	return c, nil
}

// Ways reports how the bytes of a session's tensors were carried.
type Ways struct {
	SentBytes, ReceivedBytes         int64 // total
	LaneSentBytes, LaneReceivedBytes int64 // the part carried by lanes
	// Lanes is how many lanes there are now, and Why the reason that there are not more.
	Lanes int
	Why   string
}

// Lanes returns how many lanes there are now. It never waits: an Input's release may call it.
func (s *Session) Lanes() int { return s.on.Lanes.Count() }

// Ways returns how the bytes of the session's tensors have been carried so far.
func (s *Session) Ways() (w Ways) {
	s.on.Do(func(m *stream.Machine, _ stream.Instant) {
		st := m.Status().Stats
		w = Ways{SentBytes: st.BytesOut, ReceivedBytes: st.BytesIn, LaneSentBytes: st.LaneBytesOut, LaneReceivedBytes: st.LaneBytesIn}
		w.Lanes, w.Why = s.on.Lanes.Open()
	})
	return w
}

// Lanes is like Session.Lanes, for the session that Compute uses; 0 while there is none.
func (c *Client) Lanes() (n int) {
	select {
	case c.opening <- struct{}{}:
		if c.shared != nil {
			n = c.shared.Lanes()
		}
		<-c.opening
	default:
	}
	return n
}

// Ways is like Session.Ways, for the session that Compute uses; zero before the first call.
func (c *Client) Ways() Ways {
	c.opening <- struct{}{}
	defer func() { <-c.opening }()
	if c.shared == nil {
		return Ways{}
	}
	return c.shared.Ways()
}
