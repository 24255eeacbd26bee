package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/codec"
)

// Link is an end of a connection that carries pieces in order, for one operation. One
// goroutine sends, one receives, and any closes.
type Link interface {
	// Send borrows the next piece.
	Send(piece []byte) error
	// Receive fills and checks the next piece, which it borrows. It returns io.EOF when
	// the other end has left.
	Receive(piece []byte) error
	Close() error
}

// ackBytes acknowledge an upload, in a piece.
const ackBytes = 8

// Ask does op over l at the client, in pieces of size bytes, as Client.Run does. It
// borrows both.
func Ask(ctx context.Context, l Link, op Op, source, back []byte, size int, first *time.Time) error {
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
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
		err = l.Receive(make([]byte, ackBytes))
	}
	if err != nil {
		_ = l.Close() // or the sender would wait
	}
	return errors.Join(err, <-sent)
}

// Answer does op over l at the server, in pieces of size bytes, until the client leaves. It
// borrows remote.
func Answer(l Link, op Op, remote []byte, size int) error {
	if !slices.Contains(Moves, op) {
		return fmt.Errorf("bench: no operation is named %q", op)
	}
	for {
		if err := answer(l, op, remote, size); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

func answer(l Link, op Op, remote []byte, size int) error {
	if !op.Back() {
		if err := receive(l, remote, size, func([]byte) {}); err != nil {
			return err
		}
		return l.Send(remote[:ackBytes])
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

// asks is a client that opens a link for each operation.
func asks(p Place, size int, open func(context.Context, Op) (Link, error), end func() error) Client {
	links := make(map[Op]Link)
	prepare := func(ctx context.Context, op Op) (err error) {
		if links[op] == nil {
			links[op], err = open(ctx, op)
		}
		return err
	}
	return Client{
		Prepare: prepare,
		Run: func(ctx context.Context, op Op, first *time.Time) error {
			if err := prepare(ctx, op); err != nil {
				return err
			}
			return Ask(ctx, links[op], op, p.Source, p.To, size, first)
		},
		Close: func() (err error) {
			for _, l := range links {
				if l != nil { // it was opened
					err = errors.Join(err, l.Close())
				}
			}
			return errors.Join(err, end())
		},
	}
}

// Accept serves connections to l, each on a goroutine, until ctx ends, and closes l. What
// goes wrong with one before that goes to stderr.
func Accept(ctx context.Context, l net.Listener, serve func(net.Conn) error) error {
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	var all sync.WaitGroup
	for {
		conn, err := l.Accept()
		if err != nil {
			all.Wait()
			if ctx.Err() != nil {
				err = nil
			}
			return err
		}
		all.Go(func() {
			defer conn.Close() // or the client would wait
			defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
			if err := serve(conn); err != nil && ctx.Err() == nil {
				fmt.Fprintln(os.Stderr, err)
			}
		})
	}
}

// CheckSum returns an error if a piece, which it borrows, does not have the checksum
// that was sent, from a seed.
func CheckSum(kind codec.Checksum, piece []byte, seed, sent uint32) error {
	if got := kind.Update(seed, piece); got != sent {
		return fmt.Errorf("bench: a piece has checksum %08x, sent was %08x", got, sent)
	}
	return nil
}
