package wire

import (
	"context"
	"errors"

	"google.golang.org/grpc/peer"

	"github.com/tensorferry/tensorferry/frame"
)

// Stream is a grpc.ServerStream or a grpc.ClientStream whose codec is Codec.
type Stream interface {
	Context() context.Context
	SendMsg(m any) error
	RecvMsg(m any) error
}

// Conn is a gRPC stream of frames. Send side: Send. Receive side: Recv, Free,
// Control. One goroutine per side.
type Conn struct {
	stream  Stream
	out, in Message
	begun   bool // a frame was sent; of the send side
}

// NewConn returns a Conn over a gRPC stream. flight learns of what is sent; it is nil
// on a client, whose connection is known only after the first frame.
func NewConn(stream Stream, flight *InFlight) *Conn {
	return &Conn{stream: stream, out: Message{InFlight: flight}}
}

// Context returns that of the gRPC stream.
func (c *Conn) Context() context.Context { return c.stream.Context() }

// Send sends a frame. The caller hands over held, nil if nobody waits for the payload:
// Release runs once, on any goroutine, also when Send fails.
func (c *Conn) Send(f *frame.Frame, held Releaser) error {
	if c.begun && c.out.InFlight == nil {
		c.out.InFlight = flightOf(c.stream.Context())
	}
	c.out.Frame, c.out.Held = *f, held
	err := c.stream.SendMsg(&c.out)
	c.begun, c.out.Frame = true, frame.Frame{}
	if held := c.out.Held; held != nil { // it never reached the codec
		c.out.Held = nil
		held.Release()
	}
	return err
}

// Recv returns the next frame, which the caller borrows until the next Recv or Free.
// Bad bytes are a *frame.Error, the end of the peer's frames is io.EOF, and any other
// error is gRPC's.
func (c *Conn) Recv() (*frame.Frame, error) {
	if err := c.stream.RecvMsg(&c.in); err != nil {
		return nil, err
	}
	if err := told(c.in.Err); err != nil {
		return nil, err
	}
	return &c.in.Frame, nil
}

// told is what a peer is told of bytes that break the contract, a *frame.Error.
func told(err error) error {
	if err == nil {
		return nil
	}
	code := frame.InvalidArgument
	if errors.Is(err, ErrTooLarge) {
		code = frame.ResourceExhausted
	}
	return &frame.Error{Code: code, Text: err.Error()}
}

// Free ends the loan of the frame received.
func (c *Conn) Free() { c.in.Free() }

// Control returns how many bytes of the frame received are not payload.
func (c *Conn) Control() int { return c.in.Control }

// Finish ends the loans of frames that gRPC has not begun to read. A client calls it
// when its RPC has ended and nobody sends any more: gRPC lets go of the rest by itself,
// or the connection dies.
func (c *Conn) Finish() {
	if f := c.out.InFlight; f != nil {
		f.revoke(&c.out, true)
	}
}

// Excuse has what was sent and lies unread taken for sent just now, for InFlight.Look. It
// is safe for concurrent use.
func (c *Conn) Excuse() {
	if f := c.out.InFlight; f != nil {
		f.excuse(&c.out)
	}
}

// Unsent ends the loan of what a server has just sent, a *Message or an *Answer, if
// gRPC has not begun to read it. The server calls it when the RPC was over once gRPC
// had queued it: what is queued after the RPC's end gRPC does not let go of.
func Unsent(sent any) {
	var f *InFlight
	switch m := sent.(type) {
	case *Message:
		f = m.InFlight
	case *Answer:
		f = m.InFlight
	}
	if f != nil {
		f.revoke(sent, false)
	}
}

// flightOf returns what is in flight on the connection of a client's RPC, nil if its
// credentials are not from Track.
func flightOf(ctx context.Context) *InFlight {
	if p, ok := peer.FromContext(ctx); ok {
		if a, ok := p.Addr.(trackedAddr); ok {
			return a.flight
		}
	}
	return nil
}
