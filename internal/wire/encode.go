package wire

import (
	"encoding/binary"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

// marshal copies the frame, its payload included.
func (m *Message) marshal() (mem.BufferSlice, error) {
	e := encoder{b: m.cold[:0]}
	e.frame(&m.Frame)
	if m.cold = e.b; cap(m.cold) > maxColdBytes {
		m.cold = nil
	}
	if e.err == nil && len(e.b) > MaxControlBytes {
		e.err = tooLarge("frame", "bytes beside the payload", MaxControlBytes, len(e.b))
	}
	n := m.Frame.Chunk.Len()
	if e.err == nil && n > frame.ChunkBytesCeiling {
		e.err = tooLarge("chunk", "bytes", frame.ChunkBytesCeiling, n)
	}
	if e.err != nil {
		return nil, e.err
	}
	c := m.room(len(e.b) + n)
	*c.data = append(*c.data, e.b...)
	for _, v := range m.Frame.Chunk.Data {
		*c.data = append(*c.data, v...)
	}
	return c.buffers(), nil
}

// marshal encodes the message as the stock codec does.
func (a *Answer) marshal() (mem.BufferSlice, error) {
	m, ok := a.Message.(proto.Message)
	if !ok {
		return stock.Marshal(a.Message)
	}
	c := a.room(proto.Size(m))
	b, err := proto.MarshalOptions{UseCachedSize: true}.MarshalAppend(*c.data, m)
	if err != nil {
		c.Put(nil)
		return nil, err
	}
	*c.data = b
	return c.buffers(), nil
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
		e.flag(11, h.Stores)
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
		if c.Put != nil {
			at := e.open(6)
			e.flag(1, c.Put.All)
			e.close(at)
		}
		if c.Get != nil {
			e.get(c.Get)
		}
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
		e.flag(10, d.OnAllowance)
		e.number(11, uint64(d.RetainChunks))
		e.flag(12, d.Held)
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
	for i := range f.Ends {
		at := e.open(fieldEnds)
		e.id(1, f.Ends[i].Call)
		e.number(2, f.Ends[i].Tensors)
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
		e.flag(7, s.Durable)
		e.number(8, uint64(s.RetryAfterMillis))
		if !s.Call.IsZero() {
			e.id(9, s.Call)
		}
		e.close(at)
	}
	if f.HasChunk() {
		e.chunk(&f.Chunk)
	}
}

func (e *encoder) get(g *frame.Get) {
	at := e.open(7)
	for i := range g.Selections {
		s := &g.Selections[i]
		at := e.open(1)
		e.name(1, "selection.name", s.Name)
		e.flag(2, s.Source)
		e.entries(3, "selection.params", s.Params)
		for _, r := range s.Held {
			at := e.open(4)
			e.number(1, uint64(r.Off))
			e.number(2, uint64(r.Len))
			e.close(at)
		}
		if len(s.HeldDigest) > 0 {
			e.bytes(5, s.HeldDigest)
		}
		e.close(at)
	}
	e.flag(2, g.More)
	e.close(at)
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

func (e *encoder) flag(field protowire.Number, v bool) {
	if v {
		e.number(field, 1)
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
