package kinds

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/bench"
)

// pieces are the bytes that a raw socket writes, reads and checks at a time: a chunk
// of tensorferry, and what stays in a core's cache between the copy and the checksum.
var pieces = []int{bench.ChunkBytes, smallPiece}

// rawKinds are a socket and nothing else: a piece is one write, and is read where it
// belongs; a relu is computed there, beside the receiver. A checksum goes before its
// piece, and is checked when the piece is whole, at every end.
func rawKinds() (all []bench.Kind) {
	for _, sum := range []codec.Checksum{0, codec.CRC32C, codec.CRC32} {
		for _, size := range pieces {
			all = append(all, raw(sum, size, false))
		}
	}
	for _, size := range pieces {
		all = append(all, raw(codec.CRC32C, size, true))
	}
	return all
}

// RawName names a kind of raw socket.
func RawName(sum codec.Checksum, size int) string {
	return fmt.Sprintf("raw socket, %s, %s", SumText(sum), bench.ByteText(size))
}

// RawTLS names a kind of raw socket that is encrypted, with CRC-32C, as tensorferry is
// beside it.
func RawTLS(size int) string { return "crypto/tls, " + bench.ByteText(size) }

func raw(sum codec.Checksum, size int, secure bool) bench.Kind {
	name := RawName(sum, size)
	if secure {
		name = RawTLS(size)
	}
	return bench.Kind{
		Name: name,
		Serve: func(l net.Listener, p bench.Place) (bench.Server, error) {
			creds, err := serverCredentials(p, secure)
			if err != nil {
				return bench.Server{}, errors.Join(err, l.Close())
			}
			idle := bench.NewIdle()
			return one(l, idle, func(conn net.Conn) error {
				defer close(idle)
				conn, _, err := creds.ServerHandshake(conn)
				if err != nil {
					return err
				}
				return answers(newRawLink(conn, sum, secure), p.To, size, idle)
			}), nil
		},
		Dial: func(ctx context.Context, p bench.Place) (bench.Client, error) {
			creds, err := clientCredentials(p, secure)
			if err != nil {
				return bench.Client{}, err
			}
			conn, err := new(net.Dialer).DialContext(ctx, p.Network, p.Address)
			if err != nil {
				return bench.Client{}, err
			}
			secured, _, err := creds.ClientHandshake(ctx, "", conn)
			if err != nil {
				return bench.Client{}, errors.Join(err, conn.Close())
			}
			return asks(newRawLink(secured, sum, secure), p, size), nil
		},
	}
}

// one is a server of the one client that dials l, which it is handed.
func one(l net.Listener, idle <-chan struct{}, serve func(net.Conn) error) bench.Server {
	ctx, cancel := context.WithCancel(context.Background())
	return bench.Go(func() error {
		defer l.Close()
		defer context.AfterFunc(ctx, func() { _ = l.Close() })()
		conn, err := l.Accept()
		if err == nil {
			defer conn.Close() // or the client would wait
			defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
			err = serve(conn)
		}
		if ctx.Err() != nil && errors.Is(err, net.ErrClosed) {
			return nil
		}
		return err
	}, cancel, idle)
}

// rawLink tells an op by its first byte, and sends a checksum and its piece in one
// system call, or with TLS in one record and those that follow.
type rawLink struct {
	net.Conn
	sum   codec.Checksum // 0 is none
	head  [4]byte        // of the piece that is sent
	parts [2][]byte
	join  *bufio.Writer // with TLS
}

func newRawLink(conn net.Conn, sum codec.Checksum, secure bool) *rawLink {
	l := &rawLink{Conn: conn, sum: sum}
	if secure {
		l.join = bufio.NewWriterSize(conn, recordBytes)
	}
	return l
}

func (l *rawLink) Tell(op bench.Op, _ bool) error {
	_, err := l.Write([]byte{op[0]})
	return err
}

func (l *rawLink) Hear() (bench.Op, error) {
	var first [1]byte
	if _, err := io.ReadFull(l, first[:]); err != nil {
		return "", err
	}
	for _, op := range bench.Moves {
		if op[0] == first[0] {
			return op, nil
		}
	}
	return "", fmt.Errorf("bench: no operation begins with byte %#02x", first)
}

func (l *rawLink) Send(piece []byte) error {
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

func (l *rawLink) Receive(piece []byte) error {
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
func (l *rawLink) Close() error {
	_ = l.Conn.Close()
	return nil
}
