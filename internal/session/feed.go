package session

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/background"
	"github.com/tensorferry/tensorferry/internal/fault"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// SourceError is a failure of a Feed's View: the call goes on.
type SourceError struct{ Err error }

// Error returns what failed.
func (e *SourceError) Error() string { return e.Err.Error() }

// Unwrap returns what failed.
func (e *SourceError) Unwrap() error { return e.Err }

// Feed sends one tensor, which it hashes on the way. It belongs to one goroutine.
type Feed struct {
	Session Doer
	// View shares bytes [off, off+n) of the tensor until held, which may be nil, is
	// released. It is called in order.
	View func(off, n int64) (data []byte, held interface{ Release() }, err error)
	// Digest is of all bytes; zero has Run compute it.
	Digest codec.Digest
	// Held are ranges that the receiver has, ascending and apart: a chunk that lies wholly in
	// one is not sent.
	Held []frame.Range
	// Pieces is how many views may be shared at a time, of PieceBytes or a chunk each; more
	// where the peer is far.
	Pieces int
	// Offered, if not nil, learns of each piece, on the goroutine of Run; Moved, when it was
	// sent and acknowledged, or given up, on any goroutine, perhaps with the session locked.
	Offered, Moved func(n int64)
	// Plain, of a call's input, has no digest, and each chunk is a piece: it is sent as soon
	// as there is a view of it.
	Plain bool

	announce *frame.Desc // goes with the only piece
}

// Geometry returns the geometry of a tensor in chunks of at most want bytes, or of most if
// that were too many chunks.
func Geometry(d tensor.Desc, want, most int64) (tensor.Geometry, error) {
	size, err := d.Bytes()
	if err != nil {
		return tensor.Geometry{}, err
	}
	chunk := tensor.ChunkFor(d, want)
	if size/chunk >= tensor.MaxChunks {
		chunk = most
	}
	return tensor.NewGeometry(size, chunk)
}

// Run announces the tensor, whose desc has its chunk size, and offers all of it. It returns
// the digest when everything was offered. An error is a *SourceError, stream.ErrClosed if
// the tensor has ended, or the cause of ctx.
func (f *Feed) Run(ctx context.Context, d frame.Desc) (codec.Digest, error) {
	d.Held = len(f.Held) > 0
	d.RetainChunks = uint32(f.Pieces) * f.chunks(int64(d.ChunkBytes))
	size, err := d.Bytes()
	if err != nil {
		return codec.Digest{}, err
	}
	geo := tensor.Geometry{Size: size, ChunkBytes: int64(d.ChunkBytes)}
	if f.announce = &d; len(f.Held) > 0 || geo.Count() > f.chunks(geo.ChunkBytes) {
		held := f.Held
		f.Session.Do(func(m *stream.Machine, now stream.Instant) {
			err = f.open(m, now)
			// The chunks that the receiver has are left out before it learns of the tensor: it may
			// acknowledge them at once.
			for lo, hi := uint32(0), uint32(0); err == nil && lo < geo.Count(); lo, hi = hi+1, hi+1 {
				for off, n := geo.Span(hi); hi < geo.Count() && cover(&held, off, n); off, n = geo.Span(hi) {
					hi++
				}
				if lo < hi {
					err = m.Skip(now, d.Tensor, lo, hi)
				}
			}
		})
	}
	if err != nil {
		return codec.Digest{}, err
	}
	return f.Send(ctx, d.Tensor, geo)
}

// open announces the tensor, unless that is done; the session is locked.
func (f *Feed) open(m *stream.Machine, now stream.Instant) (err error) {
	if f.announce != nil {
		err = m.OpenTensor(now, *f.announce)
		f.announce = nil
	}
	return err
}

// chunks returns how many chunks a piece has.
func (f *Feed) chunks(chunk int64) uint32 {
	if f.Plain || len(f.Held) > 0 {
		return 1
	}
	return uint32(max(1, PieceBytes/chunk))
}

// Send is the part of Run after the announcement.
func (f *Feed) Send(ctx context.Context, id tensor.ID, geo tensor.Geometry) (codec.Digest, error) {
	step := f.chunks(geo.ChunkBytes)
	var out atomic.Int64 // pieces shared
	back, most := make(News, 1), int64(f.Pieces)
	var hash *codec.Digester
	if f.Digest.IsZero() && !f.Plain {
		hash = new(codec.Digester)
	}
	held := f.Held
	var turn background.Turn // of hashing what is not sent, which no reader paces
	defer turn.End()
	for i := uint32(0); i < geo.Count(); i += step {
		off, _ := geo.Span(i)
		n := min(int64(step)*geo.ChunkBytes, geo.Size-off)
		if cover(&held, off, n) {
			if err := f.pass(ctx, &turn, off, n, hash); err != nil {
				return codec.Digest{}, err
			}
			continue
		}
		turn.End()
		for out.Load() >= most {
			if err := back.Wait(ctx); err != nil {
				return codec.Digest{}, err
			}
		}
		data, release, err := f.view(off, n, hash)
		if err != nil {
			return codec.Digest{}, err
		}
		done := func() {
			release()
			out.Add(-1)
			back.Tell()
			if f.Moved != nil {
				f.Moved(n)
			}
		}
		out.Add(1)
		f.Session.Do(func(m *stream.Machine, now stream.Instant) {
			most = max(int64(f.Pieces), m.Ahead(now)/max(n, 1))
			if err = f.open(m, now); err == nil && m.Offer(now, id, off, data, done) != nil {
				err = stream.ErrClosed
			}
		})
		if err != nil {
			release()
			return codec.Digest{}, err
		}
		if f.Offered != nil {
			f.Offered(n)
		}
	}
	if hash == nil {
		return f.Digest, nil
	}
	return hash.Sum(), nil
}

// pass hashes what is not sent.
func (f *Feed) pass(ctx context.Context, turn *background.Turn, off, n int64, hash *codec.Digester) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if hash == nil {
		return nil
	}
	if err := turn.Work(ctx); err != nil {
		return err
	}
	_, release, err := f.view(off, n, hash)
	if err == nil {
		release()
	}
	return err
}

// view returns a part of the tensor, hashed.
func (f *Feed) view(off, n int64, hash *codec.Digester) ([]byte, func(), error) {
	data, held, err := f.View(off, n)
	if err != nil {
		return nil, nil, &SourceError{err}
	}
	release := func() {
		if held != nil {
			held.Release()
		}
	}
	if int64(len(data)) != n {
		err = fmt.Errorf("session: %d bytes asked for at %d, got %d", n, off, len(data))
	} else if hash != nil {
		err = fault.Guard(func() { _, _ = hash.Write(data) })
	}
	if err != nil {
		release()
		return nil, nil, &SourceError{err}
	}
	return data, release, nil
}

// cover reports whether one of the ranges has all of [off, off+n), of a byte or more. It
// forgets those that end before: off only ascends.
func cover(held *[]frame.Range, off, n int64) bool {
	for len(*held) > 0 && (*held)[0].Off+(*held)[0].Len < off+n {
		*held = (*held)[1:]
	}
	return n > 0 && len(*held) > 0 && (*held)[0].Off <= off
}
