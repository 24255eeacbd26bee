// Package frame is the vocabulary of the wire: the parts that frames consist of, the
// status codes they carry, and the checks and limits that hold for every frame,
// whether it belongs to a session, a push or a pull.
//
// It knows no bytes on the wire (internal/wire does) and no state (stream does). A
// Frame belongs to one goroutine at a time; the views of its chunk are borrowed from
// whoever made it.
package frame

import (
	"fmt"
	"slices"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/tensor"
)

// Frame is one message of a session, a push or a pull, the same in both directions.
// The zero Frame is empty; Reset makes it so again and keeps the capacity of its
// slices, unless it is large.
type Frame struct {
	Hello     *Hello
	Calls     []Call
	Descs     []Desc
	Credits   []Credit
	Acks      []Ack
	Cancels   []tensor.ID // calls
	Failures  []Failure
	Dones     []Done
	Drain     *Drain
	Ends      []End
	Summaries []Summary
	Chunk     Chunk // no chunk when Chunk.Tensor is zero
}

// HasChunk reports whether the frame carries a chunk.
func (f *Frame) HasChunk() bool { return !f.Chunk.Tensor.IsZero() }

// Empty reports whether there is nothing in the frame.
func (f *Frame) Empty() bool {
	return f.Hello == nil && f.Drain == nil && !f.HasChunk() && len(f.Calls)+len(f.Descs)+len(f.Credits)+
		len(f.Acks)+len(f.Cancels)+len(f.Failures)+len(f.Dones)+len(f.Ends)+len(f.Summaries) == 0
}

// Reset empties the frame. The views of its chunk are forgotten, not released.
func (f *Frame) Reset() {
	was := *f
	*f = Frame{}
	if cap(was.Calls)+cap(was.Descs)+cap(was.Credits)+cap(was.Acks)+cap(was.Cancels)+
		cap(was.Failures)+cap(was.Dones)+cap(was.Ends)+cap(was.Summaries) <= KeptParts {
		f.Calls, f.Descs, f.Credits, f.Acks = emptied(was.Calls), emptied(was.Descs), emptied(was.Credits), emptied(was.Acks)
		f.Cancels, f.Failures, f.Dones = emptied(was.Cancels), emptied(was.Failures), emptied(was.Dones)
		f.Ends, f.Summaries = emptied(was.Ends), emptied(was.Summaries)
	}
	if cap(was.Chunk.Data) <= KeptViews {
		f.Chunk.Data = emptied(was.Chunk.Data)
	}
}

// emptied returns s without its content, of which nothing stays behind its end.
func emptied[T any](s []T) []T {
	clear(s)
	return s[:0]
}

// Hello opens a side of a session, a push or a pull.
type Hello struct {
	Version        uint32
	Session        tensor.ID
	MaxChunkBytes  uint32
	AllowanceBytes uint32
	Checksum       uint8 // codec.Checksum
	MaxOpenTensors uint32
	Codecs         []uint8 // codec.Codec, in order of preference; at most 16
	Lanes          uint32  // of a client: lanes that it would open; of a server: how often LaneToken opens one
	LanesAtOnce    uint32  // lanes at a time; 0 means one, of chunks without a codec
	LaneToken      LaneToken
	// ChunkIdleMillis is after how long the server gives up a client that rests and does
	// not say that it waits; 0 if it does not tell.
	ChunkIdleMillis uint32
	Stores          bool // of a server: calls may be puts and gets
	Sequences       bool // of a server: calls may be of sequences
}

// LaneToken is the secret that opens lanes of one session; zero if there is none.
type LaneToken [32]byte

// IsZero reports whether there is no token.
func (t LaneToken) IsZero() bool { return t == LaneToken{} }

// Call opens a run of a model, a put or a get.
type Call struct {
	ID            tensor.ID
	Model         string
	Inputs        []Binding
	Params        map[string]string
	TimeoutMillis uint64
	Put           *Put      // nil unless the call is a put
	Get           *Get      // nil unless the call is a get
	Sequence      *Sequence // nil unless the call is of a sequence
}

// Stored reports whether the call is a put or a get.
func (c *Call) Stored() bool { return c.Put != nil || c.Get != nil }

// Sequence says of which sequence a call is. One with MaxRows begins it, and one with End ends it.
type Sequence struct {
	ID      tensor.ID
	MaxRows uint64
	End     bool
}

// Put stores the tensors that are announced for its call.
type Put struct {
	All bool // together, or none of them
}

// Get sends the tensors that its selections pick.
type Get struct {
	Selections []Selection
	More       bool // the call comes again, with further selections
}

// Selection picks tensors of a store, or a source.
type Selection struct {
	Name       string // a name, a glob or, with Source, the name of a source
	Source     bool
	Params     map[string]string // of the source
	Held       []Range           // what the receiver has of the tensor, ascending and apart
	HeldDigest []byte            // of the tensor that Held is of; empty if that is not known
}

// Range is a range of a tensor's bytes.
type Range struct{ Off, Len int64 }

// End says that no more tensors are announced for a put.
type End struct {
	Call    tensor.ID
	Tensors uint64 // announced
}

// Binding ties a tensor to a port.
type Binding struct {
	Port   string
	Tensor tensor.ID
}

// Desc announces a tensor. SizeBytes is what the sender says; it must equal
// what data type and shape make.
type Desc struct {
	Tensor tensor.ID
	tensor.Desc
	SizeBytes  uint64
	ChunkBytes uint32
	Call       tensor.ID
	Port       string
	Name       string
	Metadata   map[string]string
	// OnAllowance says that the chunks come without credit, counted against the
	// receiver's allowance.
	OnAllowance bool
	// RetainChunks is how many unacknowledged chunks the sender can keep, 0 all.
	RetainChunks uint32
	// Held says that chunks that lie in one range of what the receiver of a get holds do
	// not come.
	Held bool
}

// Credit raises a tensor's chunk limit.
type Credit struct {
	Tensor tensor.ID
	Limit  uint32
}

// Ack tells how far a tensor has arrived, and names chunks to send again. Beyond are pairs
// [lo, hi) of further chunks that have arrived.
type Ack struct {
	Tensor tensor.ID
	Below  uint32
	Beyond []uint32
	Resend []uint32
}

// Failure ends a tensor and, unless that is a put or a get, its call. Code is a gRPC status code.
type Failure struct {
	Tensor  tensor.ID
	Code    Code
	Message string
	Reason  reason.Reason // may be empty
}

// Done ends a call.
type Done struct {
	Call             tensor.ID
	Code             Code
	Message          string
	Outputs          []Binding
	Timings          Timings
	RetryAfterMillis uint32
	Refused          bool // nothing of the call was run
	Reason           reason.Reason
	Rows             uint64 // of a step: how many its sequence has been answered
}

// Timings of a call on the server, in nanoseconds.
type Timings struct {
	Receive, Queue, H2D, Compute, D2H, FirstResult, Total int64
}

// Summary ends a tensor of a put or a get.
type Summary struct {
	Tensor           tensor.ID
	Name             string
	Code             Code
	Message          string
	SizeBytes        uint64
	Digest           codec.Digest
	Durable          bool
	RetryAfterMillis uint32
	Call             tensor.ID // zero outside a session
	Evicted          uint32    // tensors that the store evicted to make room for this one
	EvictedBytes     uint64    // of those
	Reason           reason.Reason
}

// Drain says that the sender opens nothing new.
type Drain struct{ Reason string }

// Chunk is one piece of a tensor. Data are the views its bytes lie in, in order,
// borrowed from whoever made the frame.
type Chunk struct {
	Tensor tensor.ID
	Index  uint32
	Codec  uint8 // codec.Codec
	Sum    uint32
	Data   [][]byte
}

// Len returns the payload's bytes.
func (c *Chunk) Len() int {
	n := 0
	for _, d := range c.Data {
		n += len(d)
	}
	return n
}

// Code is a status code with gRPC's numbers. This package does not import grpc; server
// and client turn codes into statuses in one file each.
type Code uint32

// The codes that the protocol itself gives.
const (
	OK                 Code = 0
	Cancelled          Code = 1
	Unknown            Code = 2
	InvalidArgument    Code = 3
	DeadlineExceeded   Code = 4
	NotFound           Code = 5
	AlreadyExists      Code = 6
	PermissionDenied   Code = 7
	ResourceExhausted  Code = 8
	FailedPrecondition Code = 9
	Aborted            Code = 10
	Internal           Code = 13
	Unavailable        Code = 14
	DataLoss           Code = 15
)

// names are gRPC's, by code.
var names = [...]string{
	"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED",
	"RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS",
	"UNAUTHENTICATED",
}

// Known returns the code that a peer's number stands for: UNKNOWN for those that gRPC
// does not have.
func (c Code) Known() Code {
	if int(c) < len(names) {
		return c
	}
	return Unknown
}

// String names the code as gRPC does.
func (c Code) String() string { return names[c.Known()] }

// Why returns why the tensor failed: UNKNOWN when that is said to be OK, or by a code that
// gRPC does not have.
func (f *Failure) Why() Code {
	if f.Code == OK {
		return Unknown
	}
	return f.Code.Known()
}

// CodeOf returns the code of a reason.
func CodeOf(r reason.Reason) Code {
	return Code(max(0, slices.Index(names[:], string(reason.Find(r, "").Code))))
}

// Error is what a peer did wrong, or why it is refused, with the code that it is told.
type Error struct {
	Code   Code
	Text   string
	Reason reason.Reason // empty if the code says it all
}

// Errorf makes an Error of a code and a formatted text.
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Text: fmt.Sprintf(format, args...)}
}

// Because makes an Error of a reason, whose code it has, and a formatted text.
func Because(r reason.Reason, format string, args ...any) *Error {
	e := &Error{CodeOf(r), fmt.Sprintf(format, args...), r}
	if string(r) == e.Code.String() {
		e.Reason = ""
	}
	return e
}

// Error returns the text.
func (e *Error) Error() string { return "frame: " + e.Text }
