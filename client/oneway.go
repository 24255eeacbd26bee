package client

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// A server whose sessions do not store has PushTensors and PullTensors. Here each carries a
// session with one call, whose frames flow one way: what the client would hear of a push
// before its answer, or would say in a pull after its request, is made up.

// oneWay opens a session over conn. hello is what the server would say.
func (c *Client) oneWay(ctx context.Context, id tensor.ID, conn func(own context.Context, hello *frame.Frame) session.Conn) (*Session, error) {
	return c.begin(ctx, stream.Config{Session: id, OneWay: true}, func(own context.Context) (session.Conn, error) {
		return conn(own, &frame.Frame{Hello: &frame.Hello{Version: frame.Version, Session: id, Checksum: uint8(c.cfg.Checksum)}}), nil
	})
}

// pushSession opens a session for one tensor to a server that on has reached.
func (c *Client) pushSession(ctx context.Context, on *Session, id tensor.ID) (*Session, error) {
	known := on.status()
	return c.oneWay(ctx, id, func(own context.Context, hello *frame.Frame) session.Conn {
		hello.Hello.MaxChunkBytes, hello.Hello.ChunkIdleMillis = uint32(known.PeerChunkBytes), uint32(time.Duration(known.PeerChunkIdle).Milliseconds())
		if known.Codec != 0 {
			hello.Hello.Codecs = []uint8{uint8(known.Codec)}
		}
		return &pushCarrier{client: c, ctx: own, id: id, heard: []*frame.Frame{hello}, opened: make(chan struct{})}
	})
}

// pushCarrier carries a put of one tensor over a PushTensors.
type pushCarrier struct {
	client *Client
	ctx    context.Context
	id     tensor.ID
	conn   *wire.Conn
	rpc    grpc.ClientStreamingClient[pb.Frame, pb.PushTensorsResponse]
	ended  bool           // of the sending side
	heard  []*frame.Frame // to be received
	opened chan struct{}
}

// Send sends what a push consists of.
func (p *pushCarrier) Send(f *frame.Frame, held interface{ Release() }) (err error) {
	if f.Hello != nil {
		if p.rpc, err = p.client.stub.PushTensors(p.ctx); err != nil {
			return err
		}
		p.conn = wire.NewConn(p.rpc, nil)
		f.Hello = &frame.Hello{Version: frame.Version, Session: p.id, Checksum: f.Hello.Checksum}
		defer close(p.opened)
	}
	ends, empty := len(f.Ends) > 0 || len(f.Cancels) > 0, f.Empty()
	f.Calls, f.Ends, f.Cancels = nil, nil, nil
	for i := range f.Descs {
		f.Descs[i].Call, f.Descs[i].RetainChunks = tensor.ID{}, 0
	}
	if p.ended && empty {
		return nil
	}
	if !f.Empty() || empty { // an empty frame says that the client waits
		err = p.conn.Send(f, held)
	} else if held != nil {
		held.Release()
	}
	if ends && !p.ended {
		p.ended = true
		err = errors.Join(err, p.rpc.CloseSend())
	}
	return err
}

// Recv returns what the answer to the push says.
func (p *pushCarrier) Recv() (*frame.Frame, error) {
	if p.heard == nil {
		return nil, io.EOF
	}
	if len(p.heard) == 0 {
		p.heard = nil
		select {
		case <-p.opened:
		case <-p.ctx.Done():
			return nil, context.Cause(p.ctx)
		}
		var resp pb.PushTensorsResponse
		if err := p.rpc.RecvMsg(&resp); err != nil {
			return nil, err
		}
		sums := new(frame.Frame)
		for _, r := range resp.GetSummaries() {
			s, err := wire.Summary(r)
			if err != nil {
				return nil, &Error{Code: codes.Internal, Cause: err}
			}
			s.Call = p.id
			sums.Summaries = append(sums.Summaries, s)
		}
		p.heard = []*frame.Frame{sums, {Dones: []frame.Done{{Call: p.id}}}}
	}
	f := p.heard[0]
	p.heard = p.heard[1:]
	return f, nil
}

// Free does nothing: no frame is lent.
func (*pushCarrier) Free() {}

// pullSession opens a session for one get.
func (c *Client) pullSession(ctx context.Context, on *Session, id tensor.ID) (*Session, error) {
	known := on.status()
	return c.oneWay(ctx, id, func(own context.Context, hello *frame.Frame) session.Conn {
		hello.Hello.ChunkIdleMillis = uint32(time.Duration(known.PeerChunkIdle).Milliseconds())
		return &pullCarrier{client: c, ctx: own, id: id, hello: hello, opened: make(chan struct{})}
	})
}

// pullCarrier carries a get over a PullTensors.
type pullCarrier struct {
	client *Client
	ctx    context.Context
	id     tensor.ID
	said   frame.Hello
	get    *frame.Get
	opened chan struct{} // closed when conn is set
	gate   session.Gate

	// Of the receiving side.
	hello *frame.Frame // not received yet
	begun bool         // the server's hello was
	conn  *wire.Conn
	chunk *frame.Frame // of the last frame, not returned yet
	sums  *frame.Frame // likewise
	rest  frame.Frame
	over  bool
}

// Send asks for what the get selects, and says that the client waits.
func (p *pullCarrier) Send(f *frame.Frame, _ interface{ Release() }) error {
	if f.Hello != nil {
		p.said = *f.Hello
	}
	if f.Empty() {
		_, _ = ask(p.ctx, p.client, p.client.stub.GetTransfer, &pb.GetTransferRequest{TransferId: p.id[:], Waiting: true})
	}
	p.gate.Sent(f)
	for i := range f.Calls {
		if part := f.Calls[i].Get; p.get == nil {
			p.get = &frame.Get{Selections: part.Selections, More: part.More}
		} else {
			p.get.Append(part)
		}
		if p.get.More {
			continue
		}
		p.said.Session = p.id
		rpc, err := p.client.stub.PullTensors(p.ctx, &pb.PullTensorsRequest{Hello: wire.ToHello(&p.said), Selections: wire.ToSelections(p.get.Selections)})
		if err != nil {
			return err
		}
		p.conn = wire.NewConn(rpc, nil)
		close(p.opened)
	}
	return nil
}

// Recv returns the next frame, and its chunk by itself, when that has a place.
func (p *pullCarrier) Recv() (*frame.Frame, error) {
	if f := p.hello; f != nil {
		p.hello = nil
		return f, nil
	}
	if f := p.sums; f != nil && p.chunk == nil {
		p.sums = nil
		return p.ended(f), nil
	}
	if f := p.chunk; f != nil {
		p.chunk = nil
		p.gate.Wait(&f.Chunk, p.ctx.Done(), nil)
		return f, nil
	}
	select {
	case <-p.opened:
	case <-p.ctx.Done():
		return nil, context.Cause(p.ctx)
	}
	if p.over {
		return nil, io.EOF
	}
	f, err := p.conn.Recv()
	var bad *frame.Error
	switch {
	case errors.Is(err, io.EOF):
		p.over = true
		return &frame.Frame{Dones: []frame.Done{{Call: p.id}}}, nil
	case errors.As(err, &bad):
		return nil, &Error{Code: codes.Internal, Message: bad.Text}
	case err != nil:
		return nil, err
	}
	if err := p.judge(f); err != nil {
		return nil, err
	}
	f.Hello = nil
	for i := range f.Summaries {
		f.Summaries[i].Call = p.id
	}
	if !f.HasChunk() {
		return p.ended(f), nil
	}
	first, sums := len(f.Descs)+len(f.Failures) > 0, f.Summaries
	p.rest = frame.Frame{Chunk: f.Chunk}
	if f.Chunk, f.Summaries = (frame.Chunk{}), nil; len(sums) > 0 { // which come after it
		p.sums = &frame.Frame{Summaries: sums}
	}
	if p.chunk = &p.rest; first {
		return f, nil
	}
	return p.Recv()
}

// ended lets late chunks of the tensors through that a frame ends.
func (p *pullCarrier) ended(f *frame.Frame) *frame.Frame {
	for i := range f.Summaries {
		p.gate.Over(f.Summaries[i].Tensor)
	}
	return f
}

// judge checks what a frame of a pull says, and makes one of a session of it.
func (p *pullCarrier) judge(f *frame.Frame) error {
	switch h := f.Hello; {
	case p.begun != (h == nil):
		return &Error{Code: codes.Internal, Message: "the server must begin a pull with one hello"}
	case h == nil:
	case h.Check() != nil:
		return h.Check()
	case h.Session != p.id || h.Checksum != p.said.Checksum:
		return &Error{Code: codes.Internal, Message: "the server's hello names another transfer or checksum"}
	}
	p.begun = true
	if len(f.Calls)+len(f.Credits)+len(f.Acks)+len(f.Cancels)+len(f.Dones)+len(f.Ends) > 0 || f.Drain != nil {
		return frame.Errorf(frame.InvalidArgument, "a pull has descs, chunks, failures and summaries; calls, credits, acks and their like are of sessions")
	}
	for i := range f.Descs {
		d := &f.Descs[i]
		if !d.Call.IsZero() {
			f.Failures = append(f.Failures, frame.Failure{Tensor: d.Tensor, Code: frame.InvalidArgument, Message: "it belongs to a call; a pull has no calls"})
		}
		d.Call, d.OnAllowance, d.Held = p.id, false, false
		p.gate.Announce(d)
	}
	for _, x := range f.Failures {
		if !p.gate.Knows(x.Tensor) {
			return frame.Errorf(frame.NotFound, "failure of tensor %s, which was not announced", x.Tensor)
		}
		p.gate.Over(x.Tensor)
	}
	if f.HasChunk() && !p.gate.Knows(f.Chunk.Tensor) {
		return frame.Errorf(frame.NotFound, "chunk %d of tensor %s, which was not announced", f.Chunk.Index, f.Chunk.Tensor)
	}
	return nil
}

// Free ends the loan of the last frame, unless its chunk is left.
func (p *pullCarrier) Free() {
	if p.chunk == nil && p.sums == nil && p.conn != nil {
		p.conn.Free()
	}
}
