// Package wire turns frames into bytes and back for grpc-go. What is sent is copied once,
// into the buffer that gRPC writes from; a payload that is received stays in gRPC's
// buffers until the one copy to its final place.
//
// It refuses to judge what a frame means. It is the only reader of raw message
// bytes; they are ordinary protobuf, which the stock codec reads and writes the same.
// The Codec is safe for concurrent use; a Message belongs to one goroutine.
//
// A frame that is received shares gRPC's buffers until Message.Free.
package wire

import (
	"errors"
	"fmt"

	"google.golang.org/grpc/encoding"
	stockproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/tensorferry/tensorferry/frame"
)

// Codec is the encoding.CodecV2 of every connection. All but a *Message goes through
// the stock codec, whose name it bears. Safe for concurrent use.
type Codec struct {
	// MaxRequestParts is the most parts, at any depth, of a *Request: an empty part of
	// two bytes becomes more than a hundred. 0 is no limit.
	MaxRequestParts int
}

var _ encoding.CodecV2 = Codec{}

var stock = encoding.GetCodecV2(stockproto.Name)

// Name is that of the stock codec: the bytes are the same.
func (Codec) Name() string { return stockproto.Name }

// Marshal copies what is sent.
func (Codec) Marshal(v any) (mem.BufferSlice, error) {
	switch v := v.(type) {
	case *Message:
		return v.marshal()
	case *Answer:
		return v.marshal()
	}
	return stock.Marshal(v)
}

// Unmarshal lets a *Message share the receive buffers that hold its payload, and
// copies everything else. For a *Message and a *Request it never fails: gRPC would end
// the RPC with a code of its own, so what is wrong is left in their Err.
func (c Codec) Unmarshal(data mem.BufferSlice, v any) error {
	switch v := v.(type) {
	case *Message:
		v.unmarshal(data)
		return nil
	case *Request:
		v.Err = told(c.request(data, v.Message))
		return nil
	}
	return stock.Unmarshal(data, v)
}

func (c Codec) request(data mem.BufferSlice, v any) error {
	joined := data.MaterializeToBuffer(Buffers) // once: the stock codec takes one buffer as it is
	defer joined.Free()
	if p, ok := v.(proto.Message); ok && c.MaxRequestParts > 0 && joined.Len() > c.MaxRequestParts { // fewer bytes hold fewer
		if n := countParts(joined.ReadOnlyData(), p.ProtoReflect().Descriptor()); n > c.MaxRequestParts {
			return tooLarge("request", "parts", c.MaxRequestParts, n)
		}
	}
	if err := stock.Unmarshal(mem.BufferSlice{joined}, v); err != nil {
		return &FieldError{ErrMalformed, "request", "a protobuf message of its RPC", err.Error()}
	}
	return nil
}

// countParts counts what decoding b would allocate: strings, bytes and messages, at
// any depth, and of lists of numbers what grows. What does not parse is the stock codec's to
// report.
func countParts(b []byte, d protoreflect.MessageDescriptor) (count int) {
	for len(b) > 0 {
		number, typ, n := protowire.ConsumeField(b)
		if n < 0 {
			break
		}
		f := d.Fields().ByNumber(number)
		switch {
		case typ == protowire.BytesType:
			count++
			if f != nil && (f.Message() != nil || f.IsPacked()) {
				_, _, tag := protowire.ConsumeTag(b)
				part, _ := protowire.ConsumeBytes(b[tag:])
				if f.Message() != nil {
					count += countParts(part, f.Message())
				} else if varints[f.Kind()] {
					count += len(part) / packedPart
				}
			}
		case f != nil && f.IsList(): // encoders pack them
			count++
		}
		b = b[n:]
	}
	return count
}

// varints are the kinds whose elements may take fewer bytes on the wire than in memory.
var varints = map[protoreflect.Kind]bool{
	protoreflect.Int32Kind: true, protoreflect.Uint32Kind: true, protoreflect.Sint32Kind: true, protoreflect.EnumKind: true,
	protoreflect.Int64Kind: true, protoreflect.Uint64Kind: true, protoreflect.Sint64Kind: true,
}

// Message is what a Conn gives to SendMsg and RecvMsg. It is reused from frame to
// frame, and belongs to one goroutine.
type Message struct {
	// Frame is the frame to send, or the one received. The slices of a received one
	// are valid until Free, and its chunk's views lie in gRPC's buffers; strings, maps
	// and shapes are the owner's. One that was sent may be changed once SendMsg has
	// returned.
	Frame frame.Frame

	Outgoing

	// Control is how many of the bytes received are not payload.
	Control int

	// Err is what was wrong with the bytes received, nil if nothing was. It
	// wraps ErrMalformed or ErrTooLarge, and the Frame is empty.
	Err error

	buffers []mem.Buffer // hold the payload received, one reference each
	coder   coder        // its b is scratch
}

// Request receives a message through the stock codec.
type Request struct {
	Message any // to be filled: a proto.Message

	// Err is what was wrong with the bytes, a *frame.Error; nil if nothing was.
	Err error
}

// Answer is a message that is sent through the stock codec.
type Answer struct {
	Message any // a proto.Message
	Outgoing
}

// Free gives the receive buffers back to gRPC. The frame is empty afterwards and
// its views are invalid. It may be called at any time, and Unmarshal begins with it.
func (m *Message) Free() {
	for i, b := range m.buffers {
		b.Free()
		m.buffers[i] = nil
	}
	if m.buffers = m.buffers[:0]; cap(m.buffers) > frame.KeptViews {
		m.buffers = nil
	}
	m.coder.reset()
	m.Frame.Reset()
}

// Errors that callers decide on. Every error of this package wraps one of them.
var (
	// ErrMalformed is wrapped when bytes are no frame or request of this protocol, or
	// when a frame cannot be written as one.
	ErrMalformed = errors.New("wire: malformed frame")
	// ErrTooLarge is wrapped when a frame or a request holds more than a limit of this
	// package.
	ErrTooLarge = errors.New("wire: frame over limit")
)

// FieldError tells which part of a frame broke the contract and how.
type FieldError struct {
	Kind  error  // ErrMalformed or ErrTooLarge
	Field string // path of the field, as in calls[0].id
	Want  string // what the contract promises
	Got   string // what was there
}

// Error says field, promised and got.
func (e *FieldError) Error() string {
	return fmt.Sprintf("%v: %s: want %s, got %s", e.Kind, e.Field, e.Want, e.Got)
}

// Unwrap returns the kind.
func (e *FieldError) Unwrap() error { return e.Kind }

func tooLarge(field, unit string, limit, got int) *FieldError {
	return &FieldError{ErrTooLarge, field, fmt.Sprintf("at most %d %s", limit, unit), fmt.Sprint(got)}
}
