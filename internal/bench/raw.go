package bench

import (
	"bufio"
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
			return Accepted(ctx, l, func(conn net.Conn) error { return answers(NewRawLink(conn, sum), p.To, size) })
		},
		Dial: func(ctx context.Context, p Place) (Client, error) {
			conn, err := p.Connect(ctx)
			if err != nil {
				return Client{}, err
			}
			return asks(NewRawLink(conn, sum), p, size), nil
		},
	}
}

// RawName names a kind of raw socket.
func RawName(sum codec.Checksum, size int) string {
	return fmt.Sprintf("raw socket, %s, %s", SumText(sum), ByteText(size))
}

// SumText names a checksum as kinds do; 0 is none.
func SumText(sum codec.Checksum) string {
	return map[codec.Checksum]string{0: "unchecked", codec.CRC32C: "CRC-32C", codec.CRC32: "CRC-32"}[sum]
}

// RawLink tells an op by its first byte, and sends a checksum and its piece in one
// system call, or where that is encrypted in one record and those that follow.
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

// Tell is Link's.
func (l *RawLink) Tell(op Op, _ bool) error {
	_, err := l.Write([]byte{op[0]})
	return err
}

// Hear is Link's.
func (l *RawLink) Hear() (Op, error) {
	var first [1]byte
	if _, err := io.ReadFull(l, first[:]); err != nil {
		return "", err
	}
	for _, op := range Moves {
		if op[0] == first[0] {
			return op, nil
		}
	}
	return "", fmt.Errorf("bench: no operation begins with byte %#02x", first)
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
