package wire

import (
	"encoding/binary"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"unicode/utf8"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

// sending is one frame on its way out, and the pool of the buffers that gRPC is
// given of it. The last Put ends the loan of the payload and frees the sending,
// with its slice of buffers: gRPC reads that only to reach a buffer it holds.
//
// gRPC does not put back what it queues after the end of its RPC, nor what is queued
// when the connection dies. It never reads the former: so a sending that is still
// queued may be revoked by whoever ends the RPC.
type sending struct {
	mem.NopBufferPool // Get is not used
	head              []byte
	parts             []outgoing
	buffers           mem.BufferSlice // of parts
	below             mem.BufferSlice // hold the views of an Answer
	left              atomic.Int32    // buffers not put back
	state             atomic.Int32    // queued, reading or ended

	held   Releaser  // nil: nothing is lent; guarded by flight.mu once it was added
	flight *InFlight // that it was added to; nil: to none
	// All below is guarded by flight.mu.
	from         any // the *Message or *Answer
	older, newer *sending
	looks        int
	copied       int  // bytes that are gRPC's alone
	removed      bool // from flight
}

// States of a sending.
const (
	queued  = iota // gRPC has read nothing of it
	reading        // gRPC puts it back, unless the connection dies
	ended          // it was put back or revoked; gRPC reads copies or zeros
)

// outgoing is a buffer that tells its sending when gRPC begins to read.
type outgoing struct {
	mem.Buffer
	of   *sending
	data []byte // a piece of head, or a view
	lent bool   // it is a view
	copy []byte // of a view that was revoked and may be read all the same
}

// zeros are read instead of a payload that was revoked and that nobody is sent.
var zeros [frame.ChunkBytesCeiling]byte

// ReadOnlyData lends the bytes until the last Free.
func (b *outgoing) ReadOnlyData() []byte {
	if s := b.of; b.lent && s.state.Load() != reading && !s.state.CompareAndSwap(queued, reading) && s.state.Load() == ended {
		if b.copy != nil {
			return b.copy
		}
		return zeros[:b.Len()]
	}
	return b.Buffer.ReadOnlyData()
}

var sendings = sync.Pool{New: func() any { return &sending{head: make([]byte, 0, headBytes)} }}

// marshal encodes the frame. The views of its chunk are lent until Held is released.
func (m *Message) marshal() (mem.BufferSlice, error) {
	s := sendings.Get().(*sending)
	s.state.Store(queued)
	s.held, m.Held = m.Held, nil
	e := encoder{b: s.head[:0]}
	e.frame(&m.Frame)
	s.head = e.b
	if e.err == nil && len(s.head) > MaxControlBytes {
		e.err = tooLarge("frame", "bytes beside the payload", MaxControlBytes, len(s.head))
	}
	var views [][]byte
	if m.Frame.HasChunk() {
		views = m.Frame.Chunk.Data
	}
	if n := m.Frame.Chunk.Len(); e.err == nil && n > frame.ChunkBytesCeiling {
		e.err = tooLarge("chunk", "bytes", frame.ChunkBytesCeiling, n)
	}
	if e.err != nil {
		s.recycle()
		return nil, e.err
	}
	if !s.addPayload(views) {
		s.end() // everything was copied
	}
	return s.lend(m.InFlight, m, cap(s.head)), nil
}

// marshal encodes the message as the stock codec does.
func (a *Answer) marshal() (mem.BufferSlice, error) {
	s := sendings.Get().(*sending)
	s.state.Store(queued)
	s.held, a.Held = a.Held, nil
	var err error
	if s.below, err = stock.Marshal(a.Message); err != nil {
		s.recycle()
		return nil, err
	}
	views := make([][]byte, len(s.below))
	for i, b := range s.below {
		views[i] = b.ReadOnlyData()
	}
	s.head = s.head[:0]
	s.addPayload(views)
	for i := range s.parts {
		s.parts[i].lent = false // but to gRPC
	}
	copied := 0
	if !a.Charged {
		copied = s.below.Len() + cap(s.head)
	}
	return s.lend(a.InFlight, a, copied), nil
}

// lend returns the parts as buffers. All are in flight, also those that nobody waits
// for: they are memory until the peer has read them.
func (s *sending) lend(flight *InFlight, from any, copied int) mem.BufferSlice {
	if flight != nil {
		s.from, s.copied = from, copied
		flight.add(s)
	}
	// From the first NewBuffer on the parts must stay where they are.
	s.left.Store(int32(len(s.parts)))
	for i := range s.parts {
		p := &s.parts[i]
		p.Buffer = mem.NewBuffer(&p.data, s)
		s.buffers = append(s.buffers, p)
	}
	if len(s.parts) == 0 { // an empty message: no Put will come
		s.recycle()
		return nil
	}
	return s.buffers
}

// addPayload makes the parts: large views as they lie and, between them, pieces of
// head, to which small views are copied. It reports whether any goes as it lies.
func (s *sending) addPayload(views [][]byte) (shared bool) {
	copied := 0
	for _, v := range views {
		if len(v) <= smallView {
			copied += len(v)
		} else {
			shared = true
		}
	}
	// gRPC tracks a buffer by its capacity: even the last piece needs enough.
	s.head = slices.Grow(s.head, copied+smallView+1)
	begin := 0
	piece := func() {
		if begin < len(s.head) {
			s.parts = append(s.parts, outgoing{of: s, data: s.head[begin:]})
			begin = len(s.head)
		}
	}
	for _, v := range views {
		if len(v) <= smallView {
			s.head = append(s.head, v...)
			continue
		}
		piece()
		s.parts = append(s.parts, outgoing{of: s, data: v, lent: true})
	}
	piece()
	return shared
}

// Put is called by gRPC for each buffer that nobody reads any more.
func (s *sending) Put(*[]byte) {
	if s.left.Add(-1) == 0 {
		s.recycle()
	}
}

// recycle frees s for the next frame, unless its loan was revoked: who did that ends it.
func (s *sending) recycle() {
	if s.state.Swap(ended) == ended {
		return
	}
	s.end()
	s.below.Free()
	s.below, s.from = nil, nil
	clear(s.parts)
	clear(s.buffers)
	s.parts, s.buffers = s.parts[:0], s.buffers[:0]
	if cap(s.head) <= maxPooledHead {
		sendings.Put(s)
	}
}

// encoder writes a frame the way the stock codec does in its deterministic mode:
// fields by number, maps by key, zeros left out.
type encoder struct {
	b   []byte
	err error // the first field that could not be written
}

// frame writes all of f but the chunk's payload, for which it announces the bytes.
func (e *encoder) frame(f *frame.Frame) {
	if h := f.Hello; h != nil {
		at := e.open(fieldHello)
		e.number(1, uint64(h.Version))
		e.id(2, h.Session)
		e.number(3, uint64(h.MaxChunkBytes))
		e.number(4, uint64(h.AllowanceBytes))
		e.number(5, uint64(h.Checksum))
		e.number(6, uint64(h.MaxOpenTensors))
		packed(e, 7, h.Codecs)
		e.number(8, uint64(h.Lanes))
		if !h.LaneToken.IsZero() {
			e.bytes(9, h.LaneToken[:])
		}
		e.number(10, uint64(h.ChunkIdleMillis))
		e.close(at)
	}
	for i := range f.Calls {
		c := &f.Calls[i]
		at := e.open(fieldCalls)
		e.id(1, c.ID)
		e.name(2, "call.model", c.Model)
		e.bindings(3, c.Inputs)
		e.entries(4, "call.params", c.Params)
		e.number(5, c.TimeoutMillis)
		e.close(at)
	}
	for i := range f.Descs {
		d := &f.Descs[i]
		at := e.open(fieldDescs)
		e.id(1, d.Tensor)
		e.number(2, uint64(d.DType))
		packed(e, 3, d.Shape)
		e.number(4, d.SizeBytes)
		e.number(5, uint64(d.ChunkBytes))
		if !d.Call.IsZero() {
			e.id(6, d.Call)
		}
		e.name(7, "desc.port", d.Port)
		e.name(8, "desc.name", d.Name)
		e.entries(9, "desc.metadata", d.Metadata)
		if d.OnAllowance {
			e.number(10, 1)
		}
		e.number(11, uint64(d.RetainChunks))
		e.close(at)
	}
	for i := range f.Credits {
		at := e.open(fieldCredits)
		e.id(fieldTensor, f.Credits[i].Tensor)
		e.number(fieldNumber, uint64(f.Credits[i].Limit))
		e.close(at)
	}
	for i := range f.Acks {
		a := &f.Acks[i]
		at := e.open(fieldAcks)
		e.id(fieldTensor, a.Tensor)
		e.number(fieldNumber, uint64(a.Below))
		packed(e, fieldResend, a.Resend)
		e.close(at)
	}
	for _, id := range f.Cancels {
		at := e.open(fieldCancels)
		e.id(1, id)
		e.close(at)
	}
	for i := range f.Failures {
		p := &f.Failures[i]
		at := e.open(fieldFailures)
		e.id(1, p.Tensor)
		e.number(2, uint64(p.Code))
		e.text(3, p.Message)
		e.close(at)
	}
	for i := range f.Dones {
		d := &f.Dones[i]
		at := e.open(fieldDones)
		e.id(1, d.Call)
		e.number(2, uint64(d.Code))
		e.text(3, d.Message)
		e.bindings(4, d.Outputs)
		if t := d.Timings; t != (frame.Timings{}) {
			at := e.open(5)
			for i, nanos := range [...]int64{t.Receive, t.Queue, t.H2D, t.Compute, t.D2H, t.FirstResult, t.Total} {
				e.number(protowire.Number(i+1), uint64(nanos))
			}
			e.close(at)
		}
		e.number(6, uint64(d.RetryAfterMillis))
		e.close(at)
	}
	if f.Drain != nil {
		at := e.open(fieldDrain)
		e.text(1, f.Drain.Reason)
		e.close(at)
	}
	for i := range f.Summaries {
		s := &f.Summaries[i]
		at := e.open(fieldSummaries)
		e.id(1, s.Tensor)
		e.name(2, "summary.name", s.Name)
		e.number(3, uint64(s.Code))
		e.text(4, s.Message)
		e.number(5, s.SizeBytes)
		if !s.Digest.IsZero() {
			e.bytes(6, s.Digest[:])
		}
		if s.Durable {
			e.number(7, 1)
		}
		e.number(8, uint64(s.RetryAfterMillis))
		e.close(at)
	}
	if f.HasChunk() {
		e.chunk(&f.Chunk)
	}
}

// chunk writes a chunk up to its payload, which the caller appends.
func (e *encoder) chunk(c *frame.Chunk) {
	at := e.open(fieldChunk)
	e.id(fieldTensor, c.Tensor)
	e.number(fieldNumber, uint64(c.Index))
	e.number(fieldCodec, uint64(c.Codec))
	if c.Sum > 0 {
		e.b = append(e.b, tagSum)
		e.b = protowire.AppendFixed32(e.b, c.Sum)
	}
	n := c.Len()
	if n > 0 {
		e.b = append(e.b, tagData)
		e.b = protowire.AppendVarint(e.b, uint64(n))
	}
	e.closeBefore(at, n)
}

// open begins a nested message and close ends it. Nearly all are shorter than
// 128 bytes, so one byte is left for the length and the rest moved up if not.
func (e *encoder) open(field protowire.Number) (at int) {
	e.b = protowire.AppendTag(e.b, field, protowire.BytesType)
	e.b = append(e.b, 0)
	return len(e.b)
}

func (e *encoder) close(at int) { e.closeBefore(at, 0) }

// closeBefore ends a message whose last n bytes the caller appends.
func (e *encoder) closeBefore(at, n int) {
	size := uint64(len(e.b) - at + n)
	if more := protowire.SizeVarint(size) - 1; more > 0 {
		var room [binary.MaxVarintLen64]byte
		e.b = slices.Insert(e.b, at, room[:more]...)
	}
	binary.PutUvarint(e.b[at-1:], size)
}

// packed writes numbers in one field; nothing if there are none.
func packed[N uint8 | uint32 | int64](e *encoder, field protowire.Number, list []N) {
	if len(list) == 0 {
		return
	}
	at := e.open(field)
	for _, n := range list {
		e.b = protowire.AppendVarint(e.b, uint64(n))
	}
	e.close(at)
}

func (e *encoder) number(field protowire.Number, v uint64) {
	if v != 0 {
		e.b = protowire.AppendTag(e.b, field, protowire.VarintType)
		e.b = protowire.AppendVarint(e.b, v)
	}
}

func (e *encoder) id(field protowire.Number, id tensor.ID) { e.bytes(field, id[:]) }

func (e *encoder) bytes(field protowire.Number, b []byte) {
	e.b = protowire.AppendTag(e.b, field, protowire.BytesType)
	e.b = protowire.AppendBytes(e.b, b)
}

func (e *encoder) string(field protowire.Number, s string) {
	e.b = protowire.AppendTag(e.b, field, protowire.BytesType)
	e.b = protowire.AppendString(e.b, s)
}

// name writes what identifies something, and must therefore arrive unchanged.
func (e *encoder) name(field protowire.Number, path, s string) {
	e.checkUTF8(path, s)
	if s != "" {
		e.string(field, s)
	}
}

// text writes what people read: bytes that are no text are replaced, and no
// error is so long that it would not fit a frame.
func (e *encoder) text(field protowire.Number, s string) {
	if s = Text(s); s != "" {
		e.string(field, s)
	}
}

// Text returns what goes over the wire of a text that people read: UTF-8, and no more
// than frame.TextBytes of it.
func Text(s string) string {
	return strings.ToValidUTF8(frame.Clip(s, frame.TextBytes), "?")
}

func (e *encoder) bindings(field protowire.Number, list []frame.Binding) {
	if len(list) > MaxBindings && e.err == nil {
		e.err = tooLarge("bindings", "bindings", MaxBindings, len(list))
	}
	for i := range list {
		at := e.open(field)
		e.name(1, "binding.port", list[i].Port)
		e.id(2, list[i].Tensor)
		e.close(at)
	}
}

func (e *encoder) entries(field protowire.Number, path string, m map[string]string) {
	if len(m) == 0 {
		return
	}
	for _, k := range slices.Sorted(maps.Keys(m)) {
		e.checkUTF8(path, k)
		e.checkUTF8(path, m[k])
		at := e.open(field)
		e.string(1, k)
		e.string(2, m[k])
		e.close(at)
	}
}

func (e *encoder) checkUTF8(path, s string) {
	if e.err == nil && !utf8.ValidString(s) {
		e.err = &FieldError{ErrMalformed, path, "UTF-8", "bytes that are not"}
	}
}
