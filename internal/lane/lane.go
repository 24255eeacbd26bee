// Package lane carries chunks of tensors beside gRPC, on a connection of their own: a
// header of 40 bytes, and the payload behind it, in both directions. The connection
// begins with a token, which the peer's hello has offered; docs/wire.md has the bytes.
//
// It refuses to know sessions and tensors, and to put anything on the connection but
// chunks. A Conn has a read side, Next and Read, and a write side, Send, for one goroutine
// each; anybody may close it. It lends nothing and keeps no payload.
package lane

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

// ErrHeader is wrapped when what comes is not the header of a chunk: nobody knows where
// the next one begins, and the lane ends.
var ErrHeader = errors.New("lane: not the header of a chunk")

// headerBytes is the size of a header: the tensor's ID, index, length, codec, three
// zeros, the payload's checksum, the CRC-32C of the 32 bytes before it, four zeros.
const headerBytes = 40

// Conn is a lane.
type Conn struct {
	conn  net.Conn // a *net.TCPConn or *net.UnixConn, or writes are not gathered
	close func() error

	in   [headerBytes]byte
	got  int // bytes of in
	out  [headerBytes]byte
	bufs net.Buffers // of out and the payload; its array is kept
}

// unixBuffer is what a Unix socket may hold of this side's, as setsockopt counts it: with
// the 208 KiB of most systems, which are their limit, too, where they are not told
// otherwise, both ends wait for each other. TCP finds its own measure.
const unixBuffer = 512 << 10

// New returns a lane over a connection that has been greeted. The lane takes it over;
// closed, if not nil, runs when it is closed, instead of closing conn.
func New(conn net.Conn, closed func() error) *Conn {
	if closed == nil {
		closed = conn.Close
	}
	if u, ok := conn.(*net.UnixConn); ok {
		_ = u.SetWriteBuffer(unixBuffer) // or as much as the system allows
	}
	return &Conn{conn: conn, close: closed}
}

// Next reads the header of the next chunk, and returns how many bytes of payload follow,
// which the caller reads. After the error of a deadline it may be called again.
func (c *Conn) Next(ch *frame.Chunk) (n int, err error) {
	for c.got < headerBytes {
		n, err := c.conn.Read(c.in[c.got:])
		c.got += n
		if err != nil && c.got < headerBytes {
			if errors.Is(err, io.EOF) && c.got > 0 {
				err = io.ErrUnexpectedEOF
			}
			return 0, err
		}
	}
	c.got = 0
	return parse(&c.in, ch)
}

// Read reads payload.
func (c *Conn) Read(p []byte) (int, error) { return c.conn.Read(p) }

// Send sends a chunk, whose views it borrows.
func (c *Conn) Send(ch *frame.Chunk) error {
	put(&c.out, ch)
	all := append(c.bufs[:0], c.out[:])
	all = append(all, ch.Data...)
	c.bufs = all
	_, err := c.bufs.WriteTo(c.conn)
	clear(all)
	c.bufs = all[:0]
	return err
}

// SetReadDeadline is that of a net.Conn.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.conn.SetReadDeadline(t) }

// SetWriteDeadline is that of a net.Conn.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.conn.SetWriteDeadline(t) }

// Close closes the lane.
func (c *Conn) Close() error { return c.close() }

// put writes the header of a chunk.
func put(h *[headerBytes]byte, ch *frame.Chunk) {
	copy(h[:], ch.Tensor[:])
	binary.LittleEndian.PutUint32(h[16:], ch.Index)
	binary.LittleEndian.PutUint32(h[20:], uint32(ch.Len()))
	binary.LittleEndian.PutUint32(h[24:], uint32(ch.Codec))
	binary.LittleEndian.PutUint32(h[28:], ch.Sum)
	binary.LittleEndian.PutUint32(h[32:], sum(h))
	binary.LittleEndian.PutUint32(h[36:], 0)
}

// sum is the checksum of what a header says.
func sum(h *[headerBytes]byte) uint32 { return codec.CRC32C.Update(0, h[:32]) }

// parse reads the header of a chunk.
func parse(h *[headerBytes]byte, ch *frame.Chunk) (n int, err error) {
	word := func(at int) uint32 { return binary.LittleEndian.Uint32(h[at:]) }
	size := word(20)
	switch got := sum(h); {
	case got != word(32):
		return 0, fmt.Errorf("%w: its checksum is %08x, promised was %08x", ErrHeader, got, word(32))
	case word(24) != uint32(codec.None) || word(36) != 0:
		return 0, fmt.Errorf("%w: codec %d and zeros %08x; a lane carries bytes as they are", ErrHeader, word(24), word(36))
	case size > frame.ChunkBytesCeiling:
		return 0, fmt.Errorf("%w: %d bytes, the most is %d", ErrHeader, size, frame.ChunkBytesCeiling)
	}
	*ch = frame.Chunk{Tensor: tensor.ID(h[:16]), Index: word(16), Sum: word(28), Data: ch.Data[:0]}
	if ch.Tensor.IsZero() {
		return 0, fmt.Errorf("%w: it names no tensor", ErrHeader)
	}
	return int(size), nil
}
