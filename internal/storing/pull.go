package storing

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"math"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/serving"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/internal/transfer"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
)

// pull is a client's download from the store and the sources.
type pull struct {
	service *Service
	ctx     context.Context
	record  *record
	sender  *transfer.Sender
}

// Selection is one selection of a pull: a tensor's name, a glob or a source.
type Selection struct {
	Name       string
	Source     bool
	Params     map[string]string // of the source
	Held       []transfer.Range  // what the client already has of the tensor
	HeldDigest []byte            // digest of the tensor that Held is from; empty means of the current one
}

// pulls holds the memory of the selections of all pulls, beyond pullFree each.
var pulls = slab.NewPrincipal("pull")

// Pull sends what a client selects over conn. h is the client's hello.
func (s *Service) Pull(from *serving.Caller, conn Conn, h *frame.Hello, list []Selection) error {
	return s.transfer(from, conn, serving.Pull, func(w *idleTimeout) (*record, error) {
		if bad := h.Check(); bad != nil {
			return nil, bad
		}
		bytes, bad := check(list)
		if bad != nil {
			return nil, bad
		}
		if bytes > 0 {
			if !s.Budget.TryAcquire(pulls, bytes) {
				_, _, limit := s.Budget.Used()
				return nil, serving.TryLater(frame.ResourceExhausted, "selections: keeping them takes %d bytes; all pulls together have half of memory_bytes, which is %d; "+
					"select less, hold fewer ranges, or try again later", bytes, limit)
			}
			defer s.Budget.Release(pulls, bytes)
		}
		r, err := s.log.begin(h.Session, w.kind, w.waits)
		if err != nil {
			return nil, err
		}
		p := &pull{service: s, ctx: conn.Context(), record: r, sender: &transfer.Sender{Conn: w}}
		p.sender.Checksum = codec.Checksum(h.Checksum)
		p.sender.ChunkBytes = min(int64(h.MaxChunkBytes), int64(s.Limits.ChunkBytes))
		if h.MaxChunkBytes == 0 {
			p.sender.ChunkBytes = min(1<<20, int64(s.Limits.ChunkBytes))
		}
		p.sender.Codec = codec.Choose(codec.All(), h.Codecs)
		hello := frame.Hello{Version: frame.Version, Session: h.Session, MaxChunkBytes: s.Limits.ChunkBytes, Checksum: h.Checksum, ChunkIdleMillis: s.Limits.ChunkIdleMillis()}
		if err := p.sender.Control(frame.Frame{Hello: &hello}); err != nil {
			return r, err
		}
		for i := range list {
			if err := p.selection(&list[i]); err != nil {
				return r, err
			}
		}
		return r, nil
	})
}

// check validates selections before any work is done for them. bytes is what they take of
// the budget.
func check(list []Selection) (bytes int64, bad *frame.Error) {
	refuse := func(format string, args ...any) (int64, *frame.Error) {
		return 0, frame.Errorf(frame.InvalidArgument, format, args...)
	}
	switch n := len(list); {
	case n == 0:
		return refuse("selections: none; name a tensor, a glob or a source")
	case n > Tensors:
		return 0, frame.Errorf(frame.ResourceExhausted, "selections: %d, the limit of a pull is %d; use several", n, Tensors)
	}
	for i := range list {
		sel := &list[i]
		if err := store.CheckName(sel.Name); err != nil {
			return refuse("selections[%d]: %v", i, err)
		}
		if problem := frame.CheckEntries("params", sel.Params); problem != "" {
			return refuse("selections[%d]: %s", i, problem)
		}
		if len(sel.Params) > 0 && !sel.Source {
			return refuse("selections[%d]: params are for sources; set source, or leave them out", i)
		}
		if d := len(sel.HeldDigest); d != 0 && d != len(codec.Digest{}) {
			return refuse("selections[%d]: held_digest has %d bytes, a digest has %d", i, d, len(codec.Digest{}))
		}
		end := int64(0)
		for j, r := range sel.Held {
			if r.Len <= 0 || r.Off < end || r.Len > math.MaxInt64-r.Off {
				return refuse("selections[%d].held[%d]: bytes [%d,+%d); ranges must not be empty, must ascend, must not overlap, and must end below 2^63", i, j, uint64(r.Off), uint64(r.Len))
			}
			end = r.Off + r.Len
		}
		bytes += sel.bytes()
	}
	return max(0, bytes-pullFree), nil
}

// bytes returns what a selection takes while the pull lasts.
func (w *Selection) bytes() int64 {
	return int64(selectionBytes + len(w.Name) + rangeBytes*len(w.Held) + frame.SizeOf(w.Params, entryBytes))
}

// selection sends what one selection matches. A problem with the selection or one of its
// tensors becomes a summary; an error ends the stream.
func (p *pull) selection(sel *Selection) error {
	name := sel.Name
	if sel.Source {
		src, ok := p.service.Sources.Lookup(name)
		if !ok {
			return p.refuse(name, fmt.Errorf("%w: no source %q", store.ErrNotFound, name))
		}
		var r store.Reader
		err := p.service.survive(func() (err error) {
			r, err = src(p.ctx, sel.Params)
			return err
		})
		if err != nil {
			return p.refuse(name, err)
		}
		return p.tensor(name, r, sel)
	}
	if p.service.Store == nil {
		return p.refuse(name, ErrNoStore)
	}
	for t, err := range store.Pick(name, func() (picked, error) { return p.open(name) }, p.matching(name)) {
		switch {
		case err != nil && p.ctx.Err() != nil:
			return left(p.ctx)
		case err != nil:
			return p.refuse(name, err)
		case t.err != nil:
			err = p.refuse(t.name, t.err)
		case t.name == name: // Held is of this one
			err = p.tensor(name, t.reader, sel)
		default:
			err = p.tensor(t.name, t.reader, &Selection{})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// picked is a tensor that a selection matches.
type picked struct {
	name   string
	reader store.Reader
	err    error // why reader is nil
}

func (p *pull) open(name string) (picked, error) {
	r, err := p.service.Store.Open(p.ctx, name)
	return picked{name, r, err}, err
}

// matching opens every tensor whose name matches.
func (p *pull) matching(glob string) iter.Seq2[picked, error] {
	return func(yield func(picked, error) bool) {
		for info, err := range store.Each(p.ctx, p.service.Store, glob) {
			if err != nil {
				yield(picked{}, err)
				return
			}
			t, err := p.open(info.Name)
			if errors.Is(err, store.ErrNotFound) {
				continue // deleted meanwhile
			}
			if !yield(t, nil) {
				return
			}
		}
	}
}

// viewer lets a sender read from a store's Reader while the pull lasts.
type viewer struct {
	ctx context.Context
	store.Reader
}

// View shares bytes of the tensor until held is released.
func (v viewer) View(off, n int64) ([]byte, interface{ Release() }, error) {
	return v.Reader.View(v.ctx, off, n)
}

// tensor sends one tensor, and its summary.
func (p *pull) tensor(name string, r store.Reader, sel *Selection) error {
	defer r.Release()
	info := r.Info()
	size, err := info.Bytes()
	if err != nil {
		return p.refuse(name, err)
	}
	t := transfer.Tensor{Desc: frame.Desc{Tensor: session.NewID(), Desc: info.Desc, Name: name}, From: viewer{p.ctx, r}, Digest: info.Digest}
	if d := sel.HeldDigest; len(d) == 0 || info.Digest.IsZero() || codec.Digest(d) == info.Digest {
		t.Held = sel.Held
	}
	state := p.service.log.tensor(p.record, t.Tensor, name, uint64(size))
	p.sender.Moved = func(_ *frame.Desc, bytes int64) {
		state.bytes.Add(bytes)
		p.record.bytes.Add(bytes)
	}
	sum := frame.Summary{Tensor: t.Tensor, Name: name, SizeBytes: uint64(size), Durable: info.Durable}
	var source *transfer.SourceError
	switch sum.Digest, err = p.sender.Send(p.ctx, &t); {
	case errors.As(err, &source):
		p.explain(&sum, source.Err)
	case err != nil:
		code, _ := p.service.Status(err)
		p.service.Core.TensorEnded(serving.Pull, code)
		return err // the record's end covers the tensor
	}
	if d, ok := r.(store.DigestKeeper); ok && info.Digest.IsZero() && !sum.Digest.IsZero() {
		d.Digested(sum.Digest) // so that the next pull need not hash it again
	}
	p.service.log.over(state, sum)
	p.service.Core.TensorEnded(serving.Pull, sum.Code)
	return p.sender.Control(frame.Frame{Summaries: []frame.Summary{sum}})
}

// refuse sends a failed summary for a selection, or for one tensor of it.
func (p *pull) refuse(name string, err error) error {
	sum := frame.Summary{Tensor: session.NewID(), Name: name}
	p.explain(&sum, err)
	p.service.log.over(p.service.log.tensor(p.record, sum.Tensor, name, 0), sum)
	p.service.Core.TensorEnded(serving.Pull, sum.Code)
	return p.sender.Control(frame.Frame{Summaries: []frame.Summary{sum}})
}

func (p *pull) explain(sum *frame.Summary, err error) {
	why := p.service.Explain(err, slog.String("pull", p.record.id.String()), slog.String("tensor", sum.Tensor.String()))
	sum.Digest, sum.Code, sum.Message, sum.RetryAfterMillis = codec.Digest{}, why.Code, why.Text, why.RetryMillis
}
