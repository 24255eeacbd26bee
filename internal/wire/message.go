package wire

import (
	"slices"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/tensorferry/tensorferry/frame"
)

func (m *Message) unmarshal(data mem.BufferSlice) {
	m.Free()
	m.Err = m.parse(data)
	m.coder.reset()
	if m.Err != nil {
		m.Free()
		return
	}
	m.Control = data.Len() - m.Frame.Chunk.Len()
}

// parse reads a frame. In its usual encoding the payload is the frame's end, and stays
// where it lies; any other frame is copied.
func (m *Message) parse(data mem.BufferSlice) (err error) {
	c, f, size := &m.coder, &m.Frame, data.Len()
	var head []byte // what the frame begins with
	if len(data) > 0 {
		head = data[0].ReadOnlyData()
	}
	l, usual := find(head, size)
	if !usual && len(data) > 1 { // its first buffer may be short
		const headBytes = MaxControlBytes + 16 // what is beside its payload, and the tag and length of that
		for _, b := range data {
			c.b = append(c.b, b.ReadOnlyData()[:min(b.Len(), headBytes-len(c.b))]...)
		}
		head = c.b
		l, usual = find(head, size)
	}
	if usual {
		if err := checkControl(l.payload); err != nil {
			return err
		}
		c.hasChunk = l.parts < size
		read(c, head[:l.parts], f, frameFields)
		if c.err == nil {
			read(c, head[l.chunk:l.fields], &f.Chunk, chunkFields)
			c.within("chunk")
		}
		m.share(data, l.payload)
	} else {
		head = data.Materialize()
		read(c, head, f, fields[frame.Frame]{fieldChunk: frameFields[fieldChunk]})
		if err := checkControl(size - f.Chunk.Len()); c.err == nil && err != nil {
			return err
		}
		read(c, head, f, frameFields)
	}
	if c.err == nil {
		c.check(f)
	}
	return c.failed("frame")
}

// share collects the bytes from an offset on where they lie. gRPC frees its own references
// when Unmarshal returns; Free is the other half of those taken here.
func (m *Message) share(data mem.BufferSlice, from int) {
	// No more views than buffers, so that what is kept stays close to what is used.
	views, held := slices.Grow(m.Frame.Chunk.Data, len(data)), slices.Grow(m.buffers, len(data))
	for _, b := range data {
		skip := min(from, b.Len())
		from -= skip
		if v := b.ReadOnlyData()[skip:]; len(v) > 0 {
			b.Ref()
			views, held = append(views, slices.Clip(v)), append(held, b)
		}
	}
	m.Frame.Chunk.Data, m.buffers = views, held
}

// layout says where in a frame what lies: the chunk is its last field, and the payload that
// of the chunk. Without them all ends with the frame.
type layout struct {
	parts   int // end of what comes before the chunk
	chunk   int // begin of what the chunk consists of
	fields  int // end of the chunk's other fields
	payload int // begin
}

// find finds the payload of a frame of so many bytes that begins with head. It does not if
// the frame is encoded in another way, or head ends before.
func find(head []byte, size int) (l layout, ok bool) {
	if l.parts, l.chunk, ok = last(head, 0, size, fieldChunk); ok {
		l.fields, l.payload, ok = last(head, l.chunk, size, fieldData)
	}
	return l, ok
}

// last finds a field that ends with the message, which begins in head at from: where the
// fields before it end, and where its bytes begin.
func last(head []byte, from, size int, field protowire.Number) (before, begin int, ok bool) {
	for before = from; before < len(head); {
		number, typ, tag := protowire.ConsumeTag(head[before:])
		if tag < 0 {
			return 0, 0, false
		}
		if number == field && typ == protowire.BytesType {
			n, length := protowire.ConsumeVarint(head[before+tag:])
			begin = before + tag + length
			return before, begin, length > 0 && n == uint64(size-begin)
		}
		n := protowire.ConsumeFieldValue(number, typ, head[before+tag:])
		if n < 0 {
			return 0, 0, false
		}
		before += tag + n
	}
	return size, size, before == size
}

// marshal copies the frame, its payload included.
func (m *Message) marshal() (mem.BufferSlice, error) {
	c, n := &m.coder, m.Frame.Chunk.Len()
	defer c.reset()
	c.writes = true
	write(c, &m.Frame, frameFields)
	if err := c.failed("frame"); err != nil {
		return nil, err
	}
	if err := checkControl(len(c.b)); err != nil {
		return nil, err
	}
	if n > frame.ChunkBytesCeiling {
		return nil, tooLarge("chunk", "bytes", frame.ChunkBytesCeiling, n)
	}
	out := m.room(len(c.b) + n)
	*out.data = append(*out.data, c.b...)
	for _, v := range m.Frame.Chunk.Data {
		*out.data = append(*out.data, v...)
	}
	return out.buffers(), nil
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

func checkControl(n int) error {
	if n > MaxControlBytes {
		return tooLarge("frame", "bytes beside the payload", MaxControlBytes, n)
	}
	return nil
}
