// Package lane carries chunks of tensors outside gRPC, on a connection of their own: a
// header of 40 bytes, followed by the payload, in both directions. The connection begins
// with a token that the peer's hello has offered; docs/wire.md defines the bytes.
//
// It does not know sessions and tensors, and puts only chunks on the connection. A Conn has
// a read side, Next and Read, and a write side, Send; each belongs to one goroutine. Close
// may be called from any goroutine. It lends nothing and keeps no payload.
package lane

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"time"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/tensor"
)

// ErrHeader is wrapped when a chunk's header is invalid. The start of the next one is then
// unknown, so the lane ends.
var ErrHeader = errors.New("lane: not the header of a chunk")

// headerBytes is the size of a header: the tensor's ID, index, length, codec, three
// zeros, the payload's checksum, the CRC-32C of the 32 bytes before it, four zeros.
const headerBytes = 40

// Conn is a lane.
type Conn struct {
	conn   net.Conn // writes are gathered on a *net.TCPConn or *net.UnixConn, and joined below a Secured
	socket net.Conn // conn, or below a Secured
	close  func() error
	trip   time.Duration
	past   Road // what the kernel had counted when Road was called last

	in   [headerBytes]byte
	got  int // bytes of in
	out  [headerBytes]byte
	bufs net.Buffers // out and the payload; the array is reused
	join *Batch      // of a Secured; else nil
}

// unixBuffer is the send buffer of a Unix socket, as setsockopt counts it; Linux doubles it.
// With 208 KiB, the default of most systems, which is also the maximum unless configured
// otherwise, the ends wait for each other more often. With 512 KiB they wait so seldom that
// small calls wait for a processor: the p99 beside an upload was 1.2 of that without lanes,
// with 320 KiB 0.8 (two cores, November 2026). TCP sizes its own buffers.
const unixBuffer = 320 << 10

// New returns a lane over a connection that has been greeted, and takes the connection
// over. closed, if not nil, is called instead of conn.Close when the lane is closed.
func New(conn net.Conn, closed func() error) *Conn {
	if closed == nil {
		closed = conn.Close
	}
	l := &Conn{conn: conn, close: closed, socket: conn}
	if s, ok := conn.(Secured); ok {
		l.conn, l.join, l.socket = s.Conn, s.Below, s.Below.Conn
		l.join.out = bufio.NewWriterSize(l.socket, batchBytes)
	}
	if u, ok := l.socket.(*net.UnixConn); ok {
		_ = u.SetWriteBuffer(unixBuffer) // the system may allow less
	}
	l.trip = tune(l.socket)
	return l
}

// Far is the round trip from which one connection may be too few to fill the road, as the
// window of a single one is.
const Far = time.Millisecond

// RoundTrip returns the least round trip of the connection; 0 if it is not known.
func (c *Conn) RoundTrip() time.Duration { return c.trip }

// Road is what a connection carries.
type Road struct {
	Trip        time.Duration // of a packet and its acknowledgement now, with their time in queues
	Moved       int64         // bytes that arrived, at both ends
	Sent, Again int           // packets, and those that were sent again
}

// Road returns what the connection has carried since the last call; 0 if it is not known, or
// closed. It belongs to one goroutine.
func (c *Conn) Road() Road {
	now, past := road(c.socket), c.past
	if now == (Road{}) {
		return now
	}
	c.past = now
	return Road{now.Trip, now.Moved - past.Moved, int(uint32(now.Sent - past.Sent)), int(uint32(now.Again - past.Again))} // the kernel's counts wrap
}

// Next reads the header of the next chunk and returns how many bytes of payload follow,
// which the caller reads. After a deadline error it may be called again.
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
	if c.join != nil && err == nil {
		err = c.join.flush()
	}
	clear(all)
	c.bufs = all[:0]
	return err
}

// SetReadDeadline sets the deadline of reads, as net.Conn does.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.conn.SetReadDeadline(t) }

// SetWriteDeadline sets the deadline of writes, as net.Conn does.
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

// sum returns the checksum of the first 32 bytes of a header.
func sum(h *[headerBytes]byte) uint32 { return codec.CRC32C.Update(0, h[:32]) }

// parse reads the header of a chunk.
func parse(h *[headerBytes]byte, ch *frame.Chunk) (n int, err error) {
	word := func(at int) uint32 { return binary.LittleEndian.Uint32(h[at:]) }
	size := word(20)
	switch got := sum(h); {
	case got != word(32):
		return 0, fmt.Errorf("%w: its checksum is %08x, want %08x", ErrHeader, got, word(32))
	case word(24) > math.MaxUint8 || word(36) != 0:
		return 0, fmt.Errorf("%w: reserved bytes %06x and %08x; both must be 0", ErrHeader, word(24)>>8, word(36))
	case size > frame.ChunkBytesCeiling:
		return 0, fmt.Errorf("%w: %d bytes, the limit is %d", ErrHeader, size, frame.ChunkBytesCeiling)
	}
	*ch = frame.Chunk{Tensor: tensor.ID(h[:16]), Index: word(16), Codec: uint8(word(24)), Sum: word(28), Data: ch.Data[:0]}
	if ch.Tensor.IsZero() {
		return 0, fmt.Errorf("%w: it names no tensor", ErrHeader)
	}
	return int(size), nil
}
