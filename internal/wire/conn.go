package wire

import (
	"context"
	"errors"

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
}

// NewConn returns a Conn over a gRPC stream. unread, if not nil, counts what is sent.
func NewConn(stream Stream, unread Unread) *Conn {
	return &Conn{stream: stream, out: Message{Outgoing: Outgoing{Unread: unread}}}
}

// Context returns that of the gRPC stream.
func (c *Conn) Context() context.Context { return c.stream.Context() }

// Send sends a copy of a frame. The caller hands over held, nil if nobody waits for the
// payload: Release runs once, before Send returns, also when it fails.
func (c *Conn) Send(f *frame.Frame, held interface{ Release() }) error {
	if held != nil {
		defer held.Release()
	}
	c.out.Frame = *f
	err := c.stream.SendMsg(&c.out)
	c.out.Frame = frame.Frame{}
	return err
}

// Clear reports whether gRPC has written all that was sent: it then takes a message of any size
// at once.
func (c *Conn) Clear(int) bool { return c.out.queued.Load() == 0 }

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
