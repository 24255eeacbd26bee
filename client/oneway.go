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

// oneWay opens a session for one call, to a server that on has reached.
func (c *Client) oneWay(ctx context.Context, on *Session, id tensor.ID, conn func(carrier) session.Conn) (*Session, error) {
	known := on.status()
	hello := frame.Hello{
		Version: frame.Version, Session: id, Checksum: uint8(c.cfg.Checksum),
		MaxChunkBytes: uint32(known.PeerChunkBytes), ChunkIdleMillis: uint32(time.Duration(known.PeerChunkIdle).Milliseconds()),
	}
	if known.Codec != 0 {
		hello.Codecs = []uint8{uint8(known.Codec)}
	}
	return c.begin(ctx, stream.Config{Session: id, OneWay: true}, func(own context.Context) (session.Conn, error) {
		return conn(carrier{client: c, ctx: own, id: id, heard: []*frame.Frame{{Hello: &hello}}, opened: make(chan struct{})}), nil
	})
}

// carrier is what the carriers of a push and a pull have in common.
type carrier struct {
	client *Client
	ctx    context.Context // of the session
	id     tensor.ID
	conn   *wire.Conn
	opened chan struct{} // closed when conn is set

	// Of the receiving side.
	heard []*frame.Frame // to be received
	over  bool           // there is nothing more
}

// next returns a frame of heard; nil means that the RPC says the rest.
func (c *carrier) next() (*frame.Frame, error) {
	if len(c.heard) > 0 {
		f := c.heard[0]
		c.heard = c.heard[1:]
		return f, nil
	}
	if c.over {
		return nil, io.EOF
	}
	select {
	case <-c.opened:
		return nil, nil
	case <-c.ctx.Done():
		return nil, context.Cause(c.ctx)
	}
}

// pushCarrier carries a put of one tensor over a PushTensors.
type pushCarrier struct {
	carrier
	rpc   grpc.ClientStreamingClient[pb.Frame, pb.PushTensorsResponse]
	ended bool // of the sending side
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
	ends, waits := len(f.Ends) > 0 || len(f.Cancels) > 0, f.Empty()
	f.Calls, f.Ends, f.Cancels = nil, nil, nil
	for i := range f.Descs {
		f.Descs[i].Call, f.Descs[i].RetainChunks = tensor.ID{}, 0
	}
	if !f.Empty() || waits && !p.ended { // an empty frame says that the client waits
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
	if f, err := p.next(); f != nil || err != nil {
		return f, err
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
	p.heard, p.over = []*frame.Frame{{Dones: []frame.Done{{Call: p.id}}}}, true
	return sums, nil
}

// Free does nothing: no frame is lent.
func (*pushCarrier) Free() {}

// pullCarrier carries a get over a PullTensors.
type pullCarrier struct {
	carrier
	said  frame.Hello
	get   frame.Get // as far as it was sent
	gate  session.Gate
	begun bool // the server's hello was received; of the receiving side
}

func newPullCarrier(c carrier) session.Conn {
	return &pullCarrier{carrier: c, gate: session.Gate{Kind: "pull", Parts: "descs, chunks, failures and summaries", Call: c.id}}
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
		if p.get.Append(f.Calls[i].Get); p.get.More {
			continue
		}
		p.said.Session = p.id
		pull := wire.Pull{Hello: p.said, Selections: p.get.Selections}
		rpc, err := p.client.stub.PullTensors(p.ctx, pull.Message())
		if err != nil {
			return err
		}
		p.conn = wire.NewConn(rpc, nil)
		close(p.opened)
	}
	return nil
}

// Recv returns the next frame, and its chunk by itself, when that has a place.
func (p *pullCarrier) Recv() (*frame.Frame, error) { return p.gate.Recv(p.receive, p.ctx.Done(), nil) }

// receive returns the next frame as one of a session.
func (p *pullCarrier) receive() (*frame.Frame, error) {
	if f, err := p.next(); f != nil || err != nil {
		return f, err
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
	switch h := f.Hello; {
	case p.begun != (h == nil):
		return nil, &Error{Code: codes.Internal, Message: "the server must begin a pull with one hello"}
	case h == nil:
	case h.Check() != nil:
		return nil, h.Check()
	case h.Session != p.id || h.Checksum != p.said.Checksum:
		return nil, &Error{Code: codes.Internal, Message: "the server's hello names another transfer or checksum"}
	}
	p.begun, f.Hello = true, nil
	for i := range f.Summaries {
		f.Summaries[i].Call = p.id
	}
	return f, p.gate.Pass(f)
}

// Free ends the loan of the last frame, unless something of it is left.
func (p *pullCarrier) Free() {
	if p.begun && !p.gate.Left() {
		p.conn.Free()
	}
}
