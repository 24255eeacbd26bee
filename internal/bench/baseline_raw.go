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
	Raw    = rawKind("raw", false)
	RawCRC = rawKind("raw-crc", true)
)

func rawKind(name string, sums bool) Kind {
	return Kind{
		Name: name, Text: peerTexts[name],
		Serve: func(l net.Listener, remote []byte) (Server, error) {
			ctx, cancel := context.WithCancel(context.Background())
			s := &rawServer{remote: remote, sums: sums, cancel: cancel, idle: make(chan struct{}, 1), served: make(chan error, 1)}
			go func() {
				err := s.accept(ctx, l)
				close(s.idle)
				s.served <- err
			}()
			return s, nil
		},
		Dial: func(ctx context.Context, network, address string, source, back []byte) (Client, error) {
			conn, err := new(net.Dialer).DialContext(ctx, network, address)
			if err != nil {
				return nil, err
			}
			return &rawClient{conn, source, back, sums}, nil
		},
	}
}

type rawClient struct {
	conn         net.Conn
	source, back []byte
	sums         bool
}

// Run does op once; the acknowledgement of an upload is one byte.
func (c *rawClient) Run(ctx context.Context, op Op) error {
	defer context.AfterFunc(ctx, func() { _ = c.conn.Close() })()
	if _, err := c.conn.Write([]byte{op[0]}); err != nil {
		return err
	}
	if !op.Back() {
		if err := sendRaw(c.conn, c.source, c.sums); err != nil {
			return err
		}
		var ack [1]byte
		_, err := io.ReadFull(c.conn, ack[:])
		return err
	}
	sent := make(chan error, 1)
	go func() { sent <- sendRaw(c.conn, c.source, c.sums) }() // ends with the source or the connection
	err := receiveRaw(c.conn, c.back, c.sums, func([]byte) {})
	if err != nil {
		_ = c.conn.Close()
	}
	return errors.Join(err, <-sent)
}

// Close ends the connection.
func (c *rawClient) Close() error {
	_ = c.conn.Close() // a second time after a failure
	return nil
}

type rawServer struct {
	remote []byte
	sums   bool
	cancel context.CancelFunc
	idle   chan struct{} // after each transfer, and at the end
	served chan error
}

// Idle says that Remote is not touched.
func (s *rawServer) Idle() <-chan struct{} { return s.idle }

// Close ends the connection and waits for the serving goroutine.
func (s *rawServer) Close() error {
	s.cancel()
	return <-s.served
}

// accept serves one connection until ctx ends. That is no failure.
func (s *rawServer) accept(ctx context.Context, l net.Listener) error {
	defer l.Close()
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	conn, err := l.Accept()
	if err == nil {
		defer conn.Close() // or the client would wait
		defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
		err = s.serve(conn)
	}
	if ctx.Err() != nil && errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

func (s *rawServer) serve(conn net.Conn) error {
	for {
		var first [1]byte
		if _, err := io.ReadFull(conn, first[:]); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		op, err := opOf(first[0])
		if err != nil {
			return err
		}
		if !op.Back() {
			if err := receiveRaw(conn, s.remote, s.sums, func([]byte) {}); err != nil {
				return err
			}
			if _, err := conn.Write(first[:]); err != nil {
				return err
			}
			s.idle <- struct{}{}
			continue
		}
		whole := make(chan []byte, chunks(s.remote)) // room for all: the reader never waits for the writer
		sent := make(chan error, 1)
		go func() { // ends when whole is closed, or with the connection
			w := writer{conn: conn, sums: s.sums}
			var err error
			for c := range whole {
				ops[op].compute(c)
				if err = w.write(c); err != nil {
					_ = conn.Close()
					break
				}
			}
			sent <- err
		}()
		err = receiveRaw(conn, s.remote, s.sums, func(c []byte) { whole <- c })
		close(whole)
		if err = errors.Join(err, <-sent); err != nil {
			return err
		}
		s.idle <- struct{}{}
	}
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

// sendRaw writes all of src, chunk by chunk.
func sendRaw(conn net.Conn, src []byte, sums bool) error {
	w := writer{conn: conn, sums: sums}
	for i := range chunks(src) {
		if err := w.write(chunk(src, i)); err != nil {
			return err
		}
	}
	return nil
}

// writer sends chunks, checksum and payload in one system call.
type writer struct {
	conn   net.Conn
	sums   bool
	header [4]byte
	parts  [2][]byte
}

func (w *writer) write(c []byte) error {
	if !w.sums {
		_, err := w.conn.Write(c)
		return err
	}
	binary.LittleEndian.PutUint32(w.header[:], codec.CRC32C.Update(0, c))
	w.parts = [2][]byte{w.header[:], c}
	both := net.Buffers(w.parts[:])
	_, err := both.WriteTo(w.conn)
	return err
}

// receiveRaw fills dst chunk by chunk and tells of each that is whole and checked.
func receiveRaw(conn net.Conn, dst []byte, sums bool, whole func([]byte)) error {
	for i := range chunks(dst) {
		var header [4]byte
		if sums {
			if _, err := io.ReadFull(conn, header[:]); err != nil {
				return err
			}
		}
		c := chunk(dst, i)
		if _, err := io.ReadFull(conn, c); err != nil {
			return err
		}
		if sums {
			if want, got := binary.LittleEndian.Uint32(header[:]), codec.CRC32C.Update(0, c); got != want {
				return checksumError(i, want, got)
			}
		}
		whole(c)
	}
	return nil
}

func checksumError(i int, want, got uint32) error {
	return fmt.Errorf("bench: chunk %d has checksum %08x, sent was %08x", i, got, want)
}
