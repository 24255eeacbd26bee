//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/internal/bench"
)

// sockets names n plain TCP connections, each of which carries a part of the tensor, without
// checksums.
func sockets(n int) string { return fmt.Sprintf("%d raw sockets", n) }

// socketsKind is that kind: the same bytes, and a byte that acknowledges each part.
func socketsKind(n int) bench.Kind {
	return bench.Kind{
		Name: sockets(n),
		Serve: func(ctx context.Context, l net.Listener, p bench.Place) error {
			defer context.AfterFunc(ctx, func() { _ = l.Close() })()
			return take(l, p.To, n)
		},
		Dial: func(ctx context.Context, p bench.Place) (bench.Client, error) {
			var all []net.Conn
			shut := func() (err error) {
				for _, c := range all {
					err = errors.Join(err, c.Close())
				}
				return err
			}
			for i := range n {
				c, err := new(net.Dialer).DialContext(ctx, p.Network, p.Address)
				if err == nil {
					all = append(all, c)
					_, err = c.Write([]byte{byte(i)})
				}
				if err != nil {
					return bench.Client{}, errors.Join(err, shut())
				}
			}
			run := func(ctx context.Context, op bench.Op, _ *time.Time) error {
				defer context.AfterFunc(ctx, func() { _ = shut() })()
				return each(n, func(i int) error {
					source, to := part(p.Source, i, n), part(p.To, i, n)
					if op == bench.Upload {
						_, err := all[i].Write([]byte{op[0]})
						if err == nil {
							_, err = all[i].Write(source)
						}
						if err == nil {
							_, err = io.ReadFull(all[i], make([]byte, 1))
						}
						return err
					}
					sent := make(chan error, 1)
					go func() { // ends with the part or the connection
						_, err := all[i].Write([]byte{op[0]})
						if err == nil {
							_, err = all[i].Write(source)
						}
						sent <- err
					}()
					_, err := io.ReadFull(all[i], to)
					return errors.Join(err, <-sent)
				})
			}
			return bench.Client{Run: run, Close: shut}, nil
		},
	}
}

// take serves the n connections of one client.
func take(l net.Listener, to []byte, n int) error {
	defer l.Close()
	all := make([]net.Conn, n)
	for range n {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}
		defer c.Close()
		var which [1]byte
		if _, err := io.ReadFull(c, which[:]); err != nil {
			return err
		}
		all[int(which[0])%n] = c
	}
	for {
		err := each(n, func(i int) error { return takePart(all[i], part(to, i, n)) })
		if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// takePart receives a part, and sends it back piece by piece if it is an echo's.
func takePart(c net.Conn, to []byte) error {
	var op [1]byte
	if _, err := io.ReadFull(c, op[:]); err != nil {
		return err
	}
	if op[0] == bench.Upload[0] {
		_, err := io.ReadFull(c, to)
		if err == nil {
			_, err = c.Write(op[:])
		}
		return err
	}
	whole := make(chan []byte, len(to)/bench.ChunkBytes+1) // room for all: the reader never waits for the writer
	sent := make(chan error, 1)
	go func() { // ends when whole is closed
		var err error
		for piece := range whole {
			if err == nil {
				_, err = c.Write(piece)
			}
		}
		sent <- err
	}()
	var err error
	for at := 0; at < len(to) && err == nil; at += bench.ChunkBytes {
		piece := to[at:min(at+bench.ChunkBytes, len(to))]
		if _, err = io.ReadFull(c, piece); err == nil {
			whole <- piece
		}
	}
	close(whole)
	return errors.Join(err, <-sent)
}

// part returns the i-th of n parts of data, which it shares.
func part(data []byte, i, n int) []byte { return data[len(data)*i/n : len(data)*(i+1)/n] }

// each does something n times at once.
func each(n int, do func(i int) error) error {
	var all sync.WaitGroup
	failed := make([]error, n)
	for i := range n {
		all.Go(func() { failed[i] = do(i) })
	}
	all.Wait()
	return errors.Join(failed...)
}
