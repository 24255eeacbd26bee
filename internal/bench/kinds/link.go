package kinds

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/bench"
)

// Link is an end of a connection that carries pieces in order. One goroutine sends,
// one receives, and any closes.
type Link interface {
	// Tell says what the client wants, and may wait for the first piece with that; by
	// the server, that an upload is whole.
	Tell(op bench.Op, first bool) error
	// Hear waits for what the other end tells: io.EOF when it has left.
	Hear() (bench.Op, error)
	// Send borrows the next piece.
	Send(piece []byte) error
	// Receive fills and checks the next piece, which it borrows.
	Receive(piece []byte) error
	Close() error
}

// Ask does op over l at the client, in pieces of size bytes. It borrows both.
func Ask(l Link, op bench.Op, source, back []byte, size int) error {
	if err := l.Tell(op, true); err != nil {
		return err
	}
	if op == bench.Echo && len(source) <= size { // nothing to overlap, and no goroutine to wake
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
		err = receive(l, back, size, func([]byte) {})
	} else {
		_, err = l.Hear()
	}
	if err != nil {
		_ = l.Close() // or the sender would wait
	}
	return errors.Join(err, <-sent)
}

// Answer does op over l at the server, in pieces of size bytes. It borrows remote.
func Answer(l Link, op bench.Op, remote []byte, size int) error {
	if !op.Back() {
		if err := receive(l, remote, size, func([]byte) {}); err != nil {
			return err
		}
		return l.Tell(op, false)
	}
	if op == bench.Echo && len(remote) <= size {
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
			if op == bench.ReLU {
				bench.Rectify(c)
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

// answers does what it hears until the client leaves; idle is NewIdle's.
func answers(l Link, remote []byte, size int, idle chan<- struct{}) error {
	for {
		op, err := l.Hear()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil && !slices.Contains(bench.Moves, op) {
			err = fmt.Errorf("bench: no operation is named %q", op)
		}
		if err == nil {
			err = Answer(l, op, remote, size)
		}
		if err != nil {
			return err
		}
		idle <- struct{}{}
	}
}

// asks is a client that asks over l.
func asks(l Link, p bench.Place, size int) bench.Client {
	run := func(ctx context.Context, op bench.Op, l Link) error {
		defer context.AfterFunc(ctx, func() { _ = l.Close() })()
		return Ask(l, op, p.Source, p.To, size)
	}
	return bench.Client{
		Run: func(ctx context.Context, op bench.Op) error { return run(ctx, op, l) },
		Measure: map[bench.Op]func(context.Context, int) (bench.Sample, error){
			bench.FirstResult: func(ctx context.Context, _ int) (bench.Sample, error) {
				first := &firstLink{Link: l}
				var begin time.Time
				s, err := bench.Transfer(bench.ReLU, p.To, p.Source, func() error {
					begin = time.Now()
					return run(ctx, bench.ReLU, first)
				})
				s.Total, s.Time = s.Time, first.at.Sub(begin)
				return s, err
			},
		},
		Close: l.Close,
	}
}

// firstLink notes when the first piece was received.
type firstLink struct {
	Link
	at time.Time
}

func (l *firstLink) Receive(piece []byte) error {
	err := l.Link.Receive(piece)
	if l.at.IsZero() {
		l.at = time.Now()
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
