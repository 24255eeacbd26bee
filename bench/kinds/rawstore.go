package kinds

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"

	"github.com/tensorferry/tensorferry/bench/measure"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/bench"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// RawStored names a socket that does what a push to memory and a pull from a folder do:
// both ends of a push hash it, a pull is sent from a mapped file whose digest is known and
// hashed where it arrives, and every piece has a checksum. A piece is summed and hashed
// while it is in a core's cache.
const RawStored = "raw socket, CRC-32C and digest"

// rawEntry is the name of the tensor in the file that is pulled.
const rawEntry = "x"

var rawStored = bench.Kind{
	Name: RawStored, OwnMemory: true, // or that of a pull would be compared, too
	Serve: func(ctx context.Context, l net.Listener, p bench.Place) error {
		s := &storedEnd{Place: p, path: filepath.Join(p.Dir, "raw.safetensors")}
		bench.FillFloats(p.To) // every page is written before
		return bench.Accept(ctx, l, func(conn net.Conn) error {
			s.RawLink = bench.NewRawLink(conn, codec.CRC32C)
			return errors.Join(answers(s), os.RemoveAll(s.path))
		})
	},
	Dial: func(ctx context.Context, p bench.Place) (bench.Client, error) {
		conn, err := p.Connect(ctx)
		if err != nil {
			return bench.Client{}, err
		}
		c := &storedEnd{Place: p, RawLink: bench.NewRawLink(conn, codec.CRC32C)}
		return bench.Client{
			Measure: map[bench.Op]func(context.Context, int) (bench.Sample, error){
				measure.Push: func(context.Context, int) (bench.Sample, error) { return bench.Timed(func() error { return push(c) }) },
				measure.Pull: func(context.Context, int) (bench.Sample, error) {
					return bench.Transfer(bench.Echo, p.To, p.Source, func() error { return pull(c) })
				},
				measure.PullToFile: func(context.Context, int) (bench.Sample, error) {
					defer func() { c.file = nil }()
					return toFile(p, func(f *os.File) error { c.file = f; return pull(c) })
				},
			},
			Close: c.Close,
		}, nil
	},
}

// storedEnd is an end of RawStored.
type storedEnd struct {
	bench.Place
	*bench.RawLink
	path string       // server: of the file that is pulled
	kept codec.Digest // server: its digest
	file *os.File     // client: that is filled, if any
}

// send sends the source or, at a server, the file.
func (e *storedEnd) send() error {
	if e.path == "" {
		return e.hashed(e.Source, codec.Digest{})
	}
	if e.kept.IsZero() {
		if err := e.store(); err != nil {
			return err
		}
	}
	file, err := tensorfile.OpenSafetensors(e.path) // mapped
	if err != nil {
		return err
	}
	x, err := file.Tensor(rawEntry)
	if err == nil {
		err = e.hashed(x.Data, e.kept)
	}
	return errors.Join(err, file.Close())
}

// hashed sends data, hashed unless its digest is known, and then the digest.
func (e *storedEnd) hashed(data []byte, digest codec.Digest) error {
	var hash codec.Digester
	for piece := range slices.Chunk(data, bench.SmallPiece) {
		if digest.IsZero() {
			_, _ = hash.Write(piece)
		}
		if err := e.Send(piece); err != nil {
			return err
		}
	}
	if digest.IsZero() {
		digest = hash.Sum()
	}
	_, err := e.Write(digest[:])
	return err
}

// receive fills To, or a file of as many bytes, and compares the digest.
func (e *storedEnd) receive() error {
	var hash codec.Digester
	for piece := range slices.Chunk(e.To, bench.SmallPiece) {
		if e.file != nil {
			piece = e.To[:len(piece)] // one buffer for all
		}
		if err := e.Receive(piece); err != nil {
			return err
		}
		_, _ = hash.Write(piece)
		if e.file != nil {
			if _, err := e.file.Write(piece); err != nil {
				return err
			}
		}
	}
	var sent codec.Digest
	if _, err := io.ReadFull(e, sent[:]); err != nil {
		return err
	}
	if got := hash.Sum(); got != sent {
		return fmt.Errorf("bench: the digest is %v, sent was %v", got, sent)
	}
	return nil
}

// store makes the file that is pulled: the client's source.
func (e *storedEnd) store() error {
	bench.FillFloats(e.To)
	f, err := os.Create(e.path)
	if err != nil {
		return err
	}
	err = tensorfile.WriteSafetensors(f, []tensorfile.Named{{Name: rawEntry, Tensor: bench.Floats(e.To)}}, nil)
	var hash codec.Digester
	_, _ = hash.Write(e.To)
	e.kept = hash.Sum()
	return errors.Join(err, f.Close())
}

// exchange is an end of a connection over which a client pushes and pulls.
type exchange interface {
	io.ReadWriter
	send() error
	receive() error
}

const pushes, pulls = 'p', 'g'

func push(c exchange) error {
	_, err := c.Write([]byte{pushes})
	if err == nil {
		err = c.send()
	}
	if err == nil {
		_, err = io.ReadFull(c, make([]byte, 1)) // it is there
	}
	return err
}

func pull(c exchange) error {
	_, err := c.Write([]byte{pulls})
	if err == nil {
		err = c.receive()
	}
	return err
}

// answers is the server of push and pull, until the client leaves.
func answers(s exchange) error {
	for {
		var what [1]byte
		_, err := io.ReadFull(s, what[:])
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case what[0] == pulls:
			err = s.send()
		default:
			if err = s.receive(); err == nil {
				_, err = s.Write(what[:])
			}
		}
		if err != nil {
			return err
		}
	}
}
