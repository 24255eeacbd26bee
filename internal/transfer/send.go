package transfer

import (
	"context"
	"errors"
	"fmt"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/background"
	"github.com/tensorferry/tensorferry/internal/fault"
	"github.com/tensorferry/tensorferry/tensor"
)

// Viewer is where a tensor's bytes come from.
type Viewer interface {
	// View shares bytes [off, off+n) until held, which may be nil, is released. A
	// Sender asks for them in order.
	View(off, n int64) (data []byte, held interface{ Release() }, err error)
}

// Range is a range of a tensor's bytes.
type Range struct{ Off, Len int64 }

// ranges are ascending and apart.
type ranges []Range

// cover reports whether one of them holds all of [off, off+n), of a byte or more. It
// forgets those that end before: off only ascends.
func (r *ranges) cover(off, n int64) bool {
	for len(*r) > 0 && (*r)[0].Off+(*r)[0].Len < off+n {
		*r = (*r)[1:]
	}
	return n > 0 && len(*r) > 0 && (*r)[0].Off <= off
}

// Tensor is one tensor to send.
type Tensor struct {
	frame.Desc // of which Send sets SizeBytes and ChunkBytes
	From       Viewer
	// Digest is of all bytes; zero has Send compute it.
	Digest codec.Digest
	// Held are ranges that the receiver has, ascending and apart: a chunk that
	// lies wholly in one is not sent.
	Held []Range
}

// SourceError is a failure of the tensor's Viewer: the stream goes on.
type SourceError struct{ Err error }

// Error tells what failed.
func (e *SourceError) Error() string { return e.Err.Error() }

// Unwrap returns what failed.
func (e *SourceError) Unwrap() error { return e.Err }

// Conn is where frames go. Send borrows the frame, and is handed over held, which is
// nil if nobody waits for the payload: Release runs once, also when Send fails.
type Conn interface {
	Send(f *frame.Frame, held interface{ Release() }) error
}

// Sender sends tensors, one after the other. It belongs to one goroutine.
type Sender struct {
	Conn     Conn
	Checksum codec.Checksum
	// ChunkBytes is the largest chunk sent.
	ChunkBytes int64
	// Codec is tried on every chunk.
	Codec codec.Codec
	// Moved, when not nil, hears of each chunk that Conn has taken, with its bytes
	// in the tensor.
	Moved func(d *frame.Desc, bytes int64)

	frame frame.Frame
	views [1][]byte
}

// Control sends a frame of control parts alone. An error is of the stream.
func (s *Sender) Control(f frame.Frame) error {
	s.frame = f
	return s.send(nil)
}

// Send sends a tensor's desc and chunks and returns its digest. A *SourceError
// leaves the stream as it is, and the peer without some chunks; any other error is
// of the stream, or the cause of ctx: that of the RPC, which tells of its end also
// while all is held, so that chunks are hashed, in turns with others (package
// background), and nothing is sent.
func (s *Sender) Send(ctx context.Context, t *Tensor) (codec.Digest, error) {
	size, err := t.Bytes()
	if err != nil {
		return codec.Digest{}, &SourceError{err}
	}
	chunk := tensor.ChunkFor(t.Desc.Desc, s.ChunkBytes)
	if size/chunk >= tensor.MaxChunks {
		chunk = s.ChunkBytes
	}
	geo, err := tensor.NewGeometry(size, chunk)
	if err != nil {
		return codec.Digest{}, &SourceError{err}
	}
	t.SizeBytes, t.ChunkBytes = uint64(size), uint32(chunk)
	var hash *codec.Digester
	if t.Digest.IsZero() {
		hash = new(codec.Digester)
	}
	s.frame.Reset()
	s.frame.Descs = append(s.frame.Descs, t.Desc)
	held := ranges(t.Held)
	var turn background.Turn // of hashing, while no reader paces it
	defer turn.End()
	for i := range geo.Count() {
		off, n := geo.Span(i)
		skip := held.cover(off, n)
		if skip && hash == nil {
			continue
		}
		if ctx.Err() != nil {
			return codec.Digest{}, context.Cause(ctx)
		}
		if !skip {
			turn.End()
		} else if err := turn.Work(ctx); err != nil {
			return codec.Digest{}, err
		}
		if err := s.chunk(t, i, off, n, hash, skip); err != nil {
			turn.End()
			var source *SourceError
			if errors.As(err, &source) && len(s.frame.Descs) > 0 {
				if err := s.send(nil); err != nil { // the peer must know whose failure follows
					return codec.Digest{}, err
				}
			}
			return codec.Digest{}, err
		}
	}
	turn.End()
	if len(s.frame.Descs) > 0 { // every chunk is held
		if err := s.send(nil); err != nil {
			return codec.Digest{}, err
		}
	}
	if hash == nil {
		return t.Digest, nil
	}
	return hash.Sum(), nil
}

// chunk hashes a chunk, and sends it unless it is skipped, with what waits in the frame.
func (s *Sender) chunk(t *Tensor, index uint32, off, n int64, hash *codec.Digester, skip bool) error {
	data, held, err := t.From.View(off, n)
	if err != nil {
		return &SourceError{err}
	}
	release := func() {
		if held != nil {
			held.Release()
		}
	}
	if int64(len(data)) != n {
		release()
		return &SourceError{fmt.Errorf("transfer: %d bytes asked for at %d, got %d", n, off, len(data))}
	}
	s.views[0] = data
	c := frame.Chunk{Tensor: t.Tensor, Index: index, Data: s.views[:min(n, 1)]} // no bytes, no view
	var packed *codec.Payload
	err = fault.Guard(func() {
		if hash != nil {
			_, _ = hash.Write(data)
		}
		if skip {
			return
		}
		if packed = s.Codec.Encode(c.Data); packed != nil {
			c.Codec, s.views[0] = uint8(s.Codec), packed.Bytes()
		}
		c.Sum = s.Checksum.UpdateCold(s.Checksum.Seed(c.Tensor, index), s.views[0])
	})
	switch {
	case err != nil:
		release()
		return &SourceError{err}
	case skip:
		release()
		return nil
	case packed != nil:
		release()
		held = packed
	}
	s.frame.Chunk = c
	if err := s.send(held); err != nil {
		return err
	}
	if s.Moved != nil {
		s.Moved(&t.Desc, n)
	}
	return nil
}

func (s *Sender) send(held interface{ Release() }) error {
	err := s.Conn.Send(&s.frame, held)
	s.frame.Reset()
	return err
}
