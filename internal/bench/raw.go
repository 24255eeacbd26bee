package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/tensorferry/tensorferry/codec"
)

// Raw and RawCRC are a socket and nothing else: a chunk is one write, and is read
// where it belongs; a relu is computed there, beside the receiver. With checksums,
// a chunk's CRC32C goes before it and is checked when the chunk is whole, at every
// end.
var (
	Raw    = raw("raw", func(c net.Conn) Link { return &rawLink{Conn: c} })
	RawCRC = raw("raw-crc", func(c net.Conn) Link { return &sumLink{rawLink: rawLink{Conn: c}} })
)

func raw(name string, link func(net.Conn) Link) Kind {
	return Kind{
		Name: name,
		Serve: func(l net.Listener, remote []byte) (Server, error) {
			ctx, cancel := context.WithCancel(context.Background())
			idle := make(chan struct{}, 1)
			return Go(func() error {
				defer close(idle)
				defer l.Close()
				defer context.AfterFunc(ctx, func() { _ = l.Close() })()
				conn, err := l.Accept()
				if err == nil {
					defer conn.Close() // or the client would wait
					defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
					err = answers(link(conn), remote, idle)
				}
				if ctx.Err() != nil && errors.Is(err, net.ErrClosed) {
					return nil
				}
				return err
			}, cancel, idle), nil
		},
		Dial: func(ctx context.Context, network, address string, source, back []byte) (Client, error) {
			conn, err := new(net.Dialer).DialContext(ctx, network, address)
			if err != nil {
				return Client{}, err
			}
			return asks(link(conn), source, back), nil
		},
	}
}

// rawLink tells an op by its first byte.
type rawLink struct {
	net.Conn
}

func (l *rawLink) Tell(op Op) error {
	_, err := l.Write([]byte{op[0]})
	return err
}

func (l *rawLink) Hear() (Op, error) {
	var first [1]byte
	if _, err := io.ReadFull(l, first[:]); err != nil {
		return "", err
	}
	return opOf(first[0])
}

func (l *rawLink) Send(chunk []byte) error {
	_, err := l.Write(chunk)
	return err
}

func (l *rawLink) Receive(chunk []byte) error {
	_, err := io.ReadFull(l, chunk)
	return err
}

// Close may be called again.
func (l *rawLink) Close() error {
	_ = l.Conn.Close()
	return nil
}

// sumLink sends checksum and payload in one system call.
type sumLink struct {
	rawLink
	sum   [4]byte
	parts [2][]byte
}

func (l *sumLink) Send(chunk []byte) error {
	binary.LittleEndian.PutUint32(l.sum[:], codec.CRC32C.Update(0, chunk))
	l.parts = [2][]byte{l.sum[:], chunk}
	both := net.Buffers(l.parts[:])
	_, err := both.WriteTo(l.Conn)
	return err
}

func (l *sumLink) Receive(chunk []byte) error {
	var sum [4]byte
	if err := l.rawLink.Receive(sum[:]); err != nil {
		return err
	}
	if err := l.rawLink.Receive(chunk); err != nil {
		return err
	}
	return CheckSum(chunk, 0, binary.LittleEndian.Uint32(sum[:]))
}

// opOf returns the op whose name begins with first.
func opOf(first byte) (Op, error) {
	for op := range ops {
		if op[0] == first {
			return op, nil
		}
	}
	return "", fmt.Errorf("bench: no operation begins with byte %#02x", first)
}
