package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/tensorferry/tensorferry/codec"
)

// Raw is a socket and nothing else: a piece of size bytes is one write, and is read where it
// belongs; a relu is computed there, beside the receiver. A checksum, if there is
// one, goes before its piece, and is checked when the piece is whole, at every end.
func Raw(sum codec.Checksum, size int) Kind {
	return Kind{
		Name: RawName(sum, size),
		Serve: func(ctx context.Context, l net.Listener, p Place) error {
			return Accept(ctx, l, func(conn net.Conn) error {
				op, remote, err := heard(conn, p.To)
				if err != nil {
					return err
				}
				return Answer(NewRawLink(conn, sum), op, remote, size)
			})
		},
		Dial: func(_ context.Context, p Place) (Client, error) {
			return asks(p, size, func(ctx context.Context, op Op) (Link, error) {
				conn, err := p.Connect(ctx)
				if err != nil {
					return nil, err
				}
				return NewRawLink(conn, sum), tell(conn, op, p)
			}, func() error { return nil }), nil
		},
	}
}

// opening is what a client says first: what the connection is for, and which part of the
// server's memory it has.
type opening struct {
	Op          [8]byte // filled up with zeros
	From, Bytes int64
}

func tell(w io.Writer, op Op, p Place) error {
	o := opening{From: int64(p.From), Bytes: int64(len(p.Source))}
	copy(o.Op[:], op)
	return binary.Write(w, binary.LittleEndian, o)
}

// heard returns what tell said, and that part of mem, which it shares.
func heard(r io.Reader, mem []byte) (Op, []byte, error) {
	var o opening
	if err := binary.Read(r, binary.LittleEndian, &o); err != nil {
		return "", nil, err
	}
	if size := int64(len(mem)); o.From < 0 || o.Bytes < ackBytes || o.Bytes > size || o.From > size-o.Bytes {
		return "", nil, fmt.Errorf("bench: part [%d,+%d) of %d bytes", o.From, o.Bytes, size)
	}
	return Op(bytes.TrimRight(o.Op[:], "\x00")), mem[o.From : o.From+o.Bytes], nil
}

// RawName names a kind of raw socket.
func RawName(sum codec.Checksum, size int) string {
	return fmt.Sprintf("raw socket, %s, %s", SumText(sum), ByteText(size))
}

// SumText names a checksum as kinds do; 0 is none.
func SumText(sum codec.Checksum) string {
	return map[codec.Checksum]string{0: "unchecked", codec.CRC32C: "CRC-32C", codec.CRC32: "CRC-32"}[sum]
}

// RawLink sends a checksum and its piece in one system call, or where that is encrypted in
// one record and those that follow.
type RawLink struct {
	net.Conn
	sum   codec.Checksum // 0 is none
	head  [4]byte        // of the piece that is sent
	parts [2][]byte
	join  *bufio.Writer // of what is encrypted
}

// NewRawLink returns a link over conn with a checksum.
func NewRawLink(conn net.Conn, sum codec.Checksum) *RawLink {
	l := &RawLink{Conn: conn, sum: sum}
	switch conn.(type) {
	case *net.TCPConn, *net.UnixConn:
	default:
		l.join = bufio.NewWriterSize(conn, recordBytes)
	}
	return l
}

// Send borrows piece.
func (l *RawLink) Send(piece []byte) error {
	if l.sum == 0 {
		_, err := l.Write(piece)
		return err
	}
	binary.LittleEndian.PutUint32(l.head[:], l.sum.Update(0, piece))
	if l.join != nil {
		_, _ = l.join.Write(l.head[:])
		_, _ = l.join.Write(piece)
		return l.join.Flush() // the error of all three
	}
	l.parts = [2][]byte{l.head[:], piece}
	both := net.Buffers(l.parts[:])
	_, err := both.WriteTo(l.Conn)
	return err
}

// Receive borrows piece.
func (l *RawLink) Receive(piece []byte) error {
	var head [4]byte
	if l.sum != 0 {
		if _, err := io.ReadFull(l, head[:]); err != nil {
			return err
		}
	}
	if _, err := io.ReadFull(l, piece); err != nil || l.sum == 0 {
		return err
	}
	return CheckSum(l.sum, piece, 0, binary.LittleEndian.Uint32(head[:]))
}

// Close may be called again.
func (l *RawLink) Close() error {
	if err := l.Conn.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}
