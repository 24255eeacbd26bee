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

// Requests of RawStored.
const rawPush, rawPull = 'p', 'g'

// rawEntry is the name of the tensor in the file that is pulled.
const rawEntry = "x"

var rawStored = bench.Kind{
	Name: RawStored, OwnMemory: true, // or that of a pull would be compared, too
	Serve: func(ctx context.Context, l net.Listener, p bench.Place) error {
		s := &storedEnd{Place: p, path: filepath.Join(p.Dir, "raw.safetensors")}
		bench.FillFloats(p.To) // every page is written before
		return bench.Accept(ctx, l, func(conn net.Conn) error {
			s.link = bench.NewRawLink(conn, codec.CRC32C)
			return errors.Join(s.serve(), os.RemoveAll(s.path))
		})
	},
	Dial: func(ctx context.Context, p bench.Place) (bench.Client, error) {
		conn, err := p.Connect(ctx)
		if err != nil {
			return bench.Client{}, err
		}
		c := &storedEnd{Place: p, link: bench.NewRawLink(conn, codec.CRC32C)}
		return bench.Client{
			Measure: map[bench.Op]func(context.Context, int) (bench.Sample, error){
				measure.Push: func(context.Context, int) (bench.Sample, error) { return bench.Timed(c.push) },
				measure.Pull: func(context.Context, int) (bench.Sample, error) {
					return bench.Transfer(bench.Echo, p.To, p.Source, func() error { return c.pull(nil) })
				},
				measure.PullToFile: func(context.Context, int) (bench.Sample, error) {
					return toFile(p, func(f *os.File) error { return c.pull(f) })
				},
			},
			Close: c.link.Close,
		}, nil
	},
}

// storedEnd is an end of RawStored.
type storedEnd struct {
	bench.Place
	link *bench.RawLink
	path string       // server: of the file that is pulled
	kept codec.Digest // server: its digest
}

// send sends data, hashed unless its digest is known, and then the digest.
func (e *storedEnd) send(data []byte, digest codec.Digest) error {
	var hash codec.Digester
	for piece := range slices.Chunk(data, bench.SmallPiece) {
		if digest.IsZero() {
			_, _ = hash.Write(piece)
		}
		if err := e.link.Send(piece); err != nil {
			return err
		}
	}
	if digest.IsZero() {
		digest = hash.Sum()
	}
	_, err := e.link.Write(digest[:])
	return err
}

// receive fills To, or a file of as many bytes, and compares the digest.
func (e *storedEnd) receive(f *os.File) error {
	var hash codec.Digester
	for piece := range slices.Chunk(e.To, bench.SmallPiece) {
		if f != nil {
			piece = e.To[:len(piece)] // one buffer for all
		}
		if err := e.link.Receive(piece); err != nil {
			return err
		}
		_, _ = hash.Write(piece)
		if f != nil {
			if _, err := f.Write(piece); err != nil {
				return err
			}
		}
	}
	var sent codec.Digest
	if _, err := io.ReadFull(e.link, sent[:]); err != nil {
		return err
	}
	if got := hash.Sum(); got != sent {
		return fmt.Errorf("bench: the digest is %v, sent was %v", got, sent)
	}
	return nil
}

func (e *storedEnd) push() error {
	if _, err := e.link.Write([]byte{rawPush}); err != nil {
		return err
	}
	if err := e.send(e.Source, codec.Digest{}); err != nil {
		return err
	}
	_, err := io.ReadFull(e.link, make([]byte, 1)) // it is there
	return err
}

func (e *storedEnd) pull(f *os.File) error {
	if _, err := e.link.Write([]byte{rawPull}); err != nil {
		return err
	}
	return e.receive(f)
}

// serve answers requests until the client leaves.
func (e *storedEnd) serve() error {
	for {
		var what [1]byte
		if _, err := io.ReadFull(e.link, what[:]); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if what[0] == rawPush {
			if err := e.receive(nil); err != nil {
				return err
			}
			if _, err := e.link.Write(what[:]); err != nil {
				return err
			}
			continue
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
			err = e.send(x.Data, e.kept)
		}
		if err = errors.Join(err, file.Close()); err != nil {
			return err
		}
	}
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
