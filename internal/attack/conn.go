// Package attack does to a server what no library for gRPC does: it writes HTTP/2 by
// hand, sends what never becomes whole, reads nothing, and breaks connections anywhere.
// It is for the tests of server and for the module stress, and refuses to look at what
// becomes of the server. It copies what it sends.
package attack

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/protobuf/proto"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/tensor"
)

// Conn is a connection to a server. Its methods and those of its RPCs are safe for
// concurrent use; what a Framer has itself is not.
type Conn struct {
	*http2.Framer
	ctx  context.Context
	conn net.Conn

	mu     sync.Mutex // held while frames are written; guards all below
	last   uint32     // RPC
	fields *hpack.Encoder
	block  strings.Builder // of fields
}

// NewConn begins HTTP/2 over conn, with so much window for each answer. Nothing is
// written after the end of ctx.
func NewConn(ctx context.Context, conn net.Conn, window uint32) (*Conn, error) {
	c := &Conn{Framer: http2.NewFramer(conn, conn), ctx: ctx, conn: conn}
	c.fields = hpack.NewEncoder(&c.block)
	_, err := io.WriteString(conn, http2.ClientPreface)
	return c, errors.Join(err, c.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: window}), c.WriteWindowUpdate(0, gib))
}

func (c *Conn) write(do func() error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return errors.Join(do(), c.ctx.Err())
}

// RPC is one RPC of a connection. After an error it does nothing.
type RPC struct {
	*Conn
	ID  uint32
	Err error
}

func (r *RPC) do(do func() error) {
	if r.Err == nil {
		r.Err = r.write(do)
	}
}

// Open opens an RPC, with values of metadata.
func (c *Conn) Open(method string, values ...string) *RPC {
	fields := []hpack.HeaderField{
		{Name: ":method", Value: "POST"}, {Name: ":scheme", Value: "http"}, {Name: ":path", Value: method}, {Name: ":authority", Value: "x"},
		{Name: "content-type", Value: "application/grpc"}, {Name: "te", Value: "trailers"},
	}
	for _, v := range values {
		fields = append(fields, hpack.HeaderField{Name: "x", Value: v, Sensitive: true})
	}
	r := &RPC{Conn: c}
	r.do(func() (err error) {
		r.ID = c.last + 1
		c.last += 2
		c.block.Reset()
		for _, f := range fields {
			err = errors.Join(err, c.fields.WriteField(f))
		}
		return errors.Join(err, c.WriteHeaders(http2.HeadersFrameParam{StreamID: r.ID, BlockFragment: []byte(c.block.String()), EndHeaders: true}))
	})
	return r
}

// greeted opens a session.
func (c *Conn) greeted() *RPC { return c.Open(session).message(&pb.Frame{Hello: hello()}) }

// Send sends the first n bytes of a message of size, zeros, in frames with padding.
func (r *RPC) Send(size uint32, n, frame, padding int) *RPC {
	return r.send(append(binary.BigEndian.AppendUint32([]byte{0}, size), make([]byte, n)...), frame, padding)
}

func (r *RPC) send(b []byte, frame, padding int) *RPC {
	for part := range slices.Chunk(b, frame) {
		r.do(func() error {
			if padding > 0 {
				return r.WriteDataPadded(r.ID, false, part, make([]byte, padding))
			}
			return r.WriteData(r.ID, false, part)
		})
	}
	return r
}

// frameBytes is what an HTTP/2 frame may carry if nobody has agreed on more.
const frameBytes = 16 * kib

// unfinished sends a message of a MiB but for its last byte.
func (r *RPC) unfinished() *RPC { return r.Send(mib, mib-1, frameBytes, 0) }

// message sends a whole message.
func (r *RPC) message(m proto.Message) *RPC {
	b, err := proto.Marshal(m)
	r.Err = errors.Join(r.Err, err)
	return r.send(append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(b))), b...), frameBytes, 0)
}

// asked ends the client's side of the RPC.
func (r *RPC) asked() *RPC {
	r.do(func() error { return r.WriteData(r.ID, true, nil) })
	return r
}

// chunk sends a chunk of a tensor.
func (r *RPC) chunk(id []byte, i uint32, data []byte) {
	sum := codec.CRC32C.Update(codec.CRC32C.Seed(tensor.ID(id), i), data)
	r.message(&pb.Frame{Chunk: &pb.Chunk{TensorId: id, Index: i, Checksum: sum, Data: data}})
}

// reset ends the RPC.
func (r *RPC) reset() error {
	r.do(func() error { return r.WriteRSTStream(r.ID, http2.ErrCodeCancel) })
	return r.Err
}

// rest waits until the attack ends.
func (r *RPC) rest() error {
	<-r.ctx.Done()
	return context.Cause(r.ctx)
}

// pause waits, and ends the RPC, so that another one follows.
func (r *RPC) pause(d time.Duration) error {
	select {
	case <-time.After(d):
		return r.reset()
	case <-r.ctx.Done():
		return context.Cause(r.ctx)
	}
}

// strike sends b, waits for an answer, and resets the connection.
func (c *Conn) strike(b []byte) error {
	_, _ = c.conn.Write(b)
	_, _ = c.conn.Read(make([]byte, 4*kib))
	_ = c.conn.(*net.TCPConn).SetLinger(0) // a reset, not an end
	return c.conn.Close()
}
