package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/tensorferry/tensorferry/codec"
)

// Link is an end of a connection that carries chunks in order. One goroutine sends,
// one receives, and any closes.
type Link interface {
	// Tell says what the client wants and, by the server, that an upload is whole.
	Tell(op Op) error
	// Hear waits for what the other end tells: io.EOF when it has left.
	Hear() (Op, error)
	// Send borrows the next chunk.
	Send(chunk []byte) error
	// Receive fills and checks the next chunk, which it borrows.
	Receive(chunk []byte) error
	Close() error
}

// Ask does op over l at the client, in chunks of size bytes. It borrows both.
func Ask(l Link, op Op, source, back []byte, size int) error {
	if err := l.Tell(op); err != nil {
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
		err = receive(l, back, size, func([]byte) {})
	} else {
		_, err = l.Hear()
	}
	if err != nil {
		_ = l.Close() // or the sender would wait
	}
	return errors.Join(err, <-sent)
}

// Answer does op over l at the server, in chunks of size bytes. It borrows remote.
func Answer(l Link, op Op, remote []byte, size int) error {
	if !op.Back() {
		if err := receive(l, remote, size, func([]byte) {}); err != nil {
			return err
		}
		return l.Tell(op)
	}
	whole := make(chan []byte, len(remote)/size+1) // room for all: the reader never waits for the writer
	sent := make(chan error, 1)
	go func() { // ends when whole is closed
		var err error
		for c := range whole {
			if compute := ops[op].compute; compute != nil {
				compute(c)
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

// receive fills dst and tells of each chunk that is whole and checked.
func receive(l Link, dst []byte, size int, whole func([]byte)) error {
	for c := range slices.Chunk(dst, size) {
		if err := l.Receive(c); err != nil {
			return err
		}
		whole(c)
	}
	return nil
}

// answers does what it hears until the client leaves; idle has room for 1.
func answers(l Link, remote []byte, idle chan<- struct{}) error {
	for {
		op, err := l.Hear()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if _, known := ops[op]; err == nil && !known {
			err = fmt.Errorf("bench: no operation is named %q", op)
		}
		if err == nil {
			err = Answer(l, op, remote, ChunkBytes)
		}
		if err != nil {
			return err
		}
		idle <- struct{}{}
	}
}

// asks is a client that asks over l.
func asks(l Link, source, back []byte) Client {
	run := func(ctx context.Context, op Op) error {
		defer context.AfterFunc(ctx, func() { _ = l.Close() })()
		return Ask(l, op, source, back, ChunkBytes)
	}
	return Client{run, l.Close}
}

// CheckSum returns an error if a chunk, which it borrows, does not have the
// checksum that was sent, from a seed.
func CheckSum(chunk []byte, seed, sent uint32) error {
	if got := codec.CRC32C.Update(seed, chunk); got != sent {
		return fmt.Errorf("bench: a chunk has checksum %08x, sent was %08x", got, sent)
	}
	return nil
}
