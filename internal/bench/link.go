package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"github.com/tensorferry/tensorferry/codec"
)

// Link is an end of a connection that carries pieces in order. One goroutine sends,
// one receives, and any closes.
type Link interface {
	// Tell says what the client wants, and may wait for the first piece with that; by
	// the server, that an upload is whole.
	Tell(op Op, first bool) error
	// Hear waits for what the other end tells: io.EOF when it has left.
	Hear() (Op, error)
	// Send borrows the next piece.
	Send(piece []byte) error
	// Receive fills and checks the next piece, which it borrows.
	Receive(piece []byte) error
	Close() error
}

// Ask does op over l at the client, in pieces of size bytes, as Client.Run does. It
// borrows both.
func Ask(ctx context.Context, l Link, op Op, source, back []byte, size int, first *time.Time) error {
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	if err := l.Tell(op, true); err != nil {
		return err
	}
	if op == Echo && len(source) <= size { // nothing to overlap, and no goroutine to wake
		err := l.Send(source)
		if err == nil {
			err = l.Receive(back)
		}
		return err
	}
	sent := make(chan error, 1)
	go func() { // ends with the source or the link
		for c := range slices.Chunk(source, size) {
			if err := l.Send(c); err != nil {
				sent <- err
				return
			}
		}
		sent <- nil
	}()
	var err error
	if op.Back() {
		err = receive(l, back, size, func([]byte) {
			if first != nil && first.IsZero() {
				*first = time.Now()
			}
		})
	} else {
		_, err = l.Hear()
	}
	if err != nil {
		_ = l.Close() // or the sender would wait
	}
	return errors.Join(err, <-sent)
}

// Answer does op over l at the server, in pieces of size bytes. It borrows remote.
func Answer(l Link, op Op, remote []byte, size int) error {
	if !op.Back() {
		if err := receive(l, remote, size, func([]byte) {}); err != nil {
			return err
		}
		return l.Tell(op, false)
	}
	if op == Echo && len(remote) <= size {
		err := l.Receive(remote)
		if err == nil {
			err = l.Send(remote)
		}
		return err
	}
	whole := make(chan []byte, len(remote)/size+1) // room for all: the reader never waits for the writer
	sent := make(chan error, 1)
	go func() { // ends when whole is closed
		var err error
		for c := range whole {
			if op == ReLU {
				Rectify(c)
			}
			if err == nil { // if not, the link breaks for the reader, too
				err = l.Send(c)
			}
		}
		sent <- err
	}()
	err := receive(l, remote, size, func(c []byte) { whole <- c })
	close(whole)
	return errors.Join(err, <-sent)
}

// receive fills dst and tells of each piece that is whole and checked.
func receive(l Link, dst []byte, size int, whole func([]byte)) error {
	for c := range slices.Chunk(dst, size) {
		if err := l.Receive(c); err != nil {
			return err
		}
		whole(c)
	}
	return nil
}

// answers does what it hears until the client leaves.
func answers(l Link, remote []byte, size int) error {
	for {
		op, err := l.Hear()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil && !slices.Contains(Moves, op) {
			err = fmt.Errorf("bench: no operation is named %q", op)
		}
		if err == nil {
			err = Answer(l, op, remote, size)
		}
		if err != nil {
			return err
		}
	}
}

// asks is a client that asks over l.
func asks(l Link, p Place, size int) Client {
	return Client{
		Run: func(ctx context.Context, op Op, first *time.Time) error {
			return Ask(ctx, l, op, p.Source, p.To, size, first)
		},
		Close: l.Close,
	}
}

// Accepted serves the one client that dials l until it leaves or ctx ends.
func Accepted(ctx context.Context, l net.Listener, serve func(net.Conn) error) error {
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
}

// CheckSum returns an error if a piece, which it borrows, does not have the checksum
// that was sent, from a seed.
func CheckSum(kind codec.Checksum, piece []byte, seed, sent uint32) error {
	if got := kind.Update(seed, piece); got != sent {
		return fmt.Errorf("bench: a piece has checksum %08x, sent was %08x", got, sent)
	}
	return nil
}
