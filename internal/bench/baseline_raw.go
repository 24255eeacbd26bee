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

// Raw is a socket and nothing else: a chunk is one write, and is read where it
// belongs; a relu is computed there, beside the receiver. With checksums, a chunk's CRC32C goes before it and is checked when
// the chunk is whole, at every end.
type Raw struct {
	mem            Memory
	sums           bool
	client, server net.Conn
	idle           chan struct{} // after each transfer, and at the end
	served         chan error
}

var _ Baseline = (*Raw)(nil)

// NewRaw connects over "tcp" or "unix" and starts a goroutine that serves until
// Close. It is lent mem until then.
func NewRaw(network string, mem Memory, checksums bool) (*Raw, error) {
	if err := mem.check(); err != nil {
		return nil, err
	}
	l, release, err := listen(network)
	if err != nil {
		return nil, err
	}
	defer release()
	defer func() { _ = l.Close() }() // one connection is all there will be
	// A socket that listens takes the connection before anyone accepts it.
	client, err := new(net.Dialer).DialContext(context.Background(), l.Addr().Network(), l.Addr().String())
	if err != nil {
		return nil, err
	}
	server, err := l.Accept()
	if err != nil {
		_ = client.Close()
		return nil, err
	}
	r := &Raw{mem: mem, sums: checksums, client: client, server: server,
		idle: make(chan struct{}, 1), served: make(chan error, 1)}
	go func() {
		err := r.serve()
		_ = server.Close() // or the client would wait
		close(r.idle)
		r.served <- err
	}()
	return r, nil
}

// Move does op once; the acknowledgement of an upload is one byte.
func (r *Raw) Move(ctx context.Context, op Op) (Sample, error) {
	defer r.closeOn(ctx)()
	to := [][]byte{r.mem.Remote}
	if op != Upload {
		to = append(to, r.mem.Back)
	}
	return r.mem.measured(op, func() error {
		if _, err := r.client.Write([]byte{op[0]}); err != nil { // no two ops begin alike
			return err
		}
		if op == Upload {
			if err := r.send(r.client, r.mem.Source); err != nil {
				return err
			}
			var ack [1]byte
			_, err := io.ReadFull(r.client, ack[:])
			return err
		}
		sent := make(chan error, 1)
		go func() { sent <- r.send(r.client, r.mem.Source) }() // ends with the source or the connection
		err := r.receive(r.client, r.mem.Back, func([]byte) {})
		if err != nil {
			_ = r.client.Close()
		}
		return errors.Join(err, <-sent)
	}, r.idle, to...)
}

// Close ends the connection and waits for the serving goroutine.
func (r *Raw) Close() error {
	_ = r.client.Close() // a second time after a failure
	return <-r.served
}

// closeOn makes the end of ctx the end of the connection, until undone.
func (r *Raw) closeOn(ctx context.Context) (undo func() bool) {
	return context.AfterFunc(ctx, func() { _ = r.client.Close() })
}

func (r *Raw) serve() error {
	for {
		var op [1]byte
		if _, err := io.ReadFull(r.server, op[:]); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if op[0] == Upload[0] {
			if err := r.receive(r.server, r.mem.Remote, func([]byte) {}); err != nil {
				return err
			}
			if _, err := r.server.Write(op[:]); err != nil {
				return err
			}
			r.idle <- struct{}{}
			continue
		}
		whole := make(chan []byte, r.mem.chunks()) // room for all: the reader never waits for the writer
		sent := make(chan error, 1)
		go func() { // ends when whole is closed, or with the connection
			w := writer{conn: r.server, sums: r.sums}
			var err error
			for c := range whole {
				if op[0] == ReLU[0] {
					relu(c)
				}
				if err = w.write(c); err != nil {
					_ = r.server.Close()
					break
				}
			}
			sent <- err
		}()
		err := r.receive(r.server, r.mem.Remote, func(c []byte) { whole <- c })
		close(whole)
		if err = errors.Join(err, <-sent); err != nil {
			return err
		}
		r.idle <- struct{}{}
	}
}

// send writes all of src, chunk by chunk.
func (r *Raw) send(conn net.Conn, src []byte) error {
	w := writer{conn: conn, sums: r.sums}
	for i := range r.mem.chunks() {
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

// receive fills dst chunk by chunk and tells of each that is whole and checked.
func (r *Raw) receive(conn net.Conn, dst []byte, whole func([]byte)) error {
	for i := range r.mem.chunks() {
		var header [4]byte
		if r.sums {
			if _, err := io.ReadFull(conn, header[:]); err != nil {
				return err
			}
		}
		c := chunk(dst, i)
		if _, err := io.ReadFull(conn, c); err != nil {
			return err
		}
		if r.sums {
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
