package wire

import (
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/tensorferry/tensorferry/frame"
)

// marshal copies the frame, its payload included.
func (m *Message) marshal() (mem.BufferSlice, error) {
	c, n := &m.coder, m.Frame.Chunk.Len()
	defer c.reset()
	c.mode = writing
	c.frame(&m.Frame)
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
