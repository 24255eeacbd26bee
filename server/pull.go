package server

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"math"

	"google.golang.org/grpc"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/serving"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/internal/transfer"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
)

// pull is a client's download from the store and the sources.
type pull struct {
	server *Server
	ctx    context.Context
	record *record
	sender *transfer.Sender
}

// wanted is a selection in few bytes: a pull lasts for as long as its client reads,
// and a range of a request takes five times as much as here.
type wanted struct {
	name       string
	source     bool
	params     map[string]string
	held       []transfer.Range
	heldDigest []byte
}

// pulls holds the memory of what all pulls select, beyond pullFree of each.
var pulls = slab.NewPrincipal("pull")

// PullTensors sends what a client selects.
func (s *Server) PullTensors(req *pb.PullTensorsRequest, conn grpc.ServerStreamingServer[pb.Frame]) error {
	return s.transfer(conn, serving.Pull, func(w *idleTimeout) (*record, error) {
		h, err := wire.Hello(req.GetHello())
		if err != nil {
			return nil, &frame.Error{Code: frame.InvalidArgument, Text: err.Error()}
		}
		if bad := h.Check(); bad != nil {
			return nil, bad
		}
		list, bytes, err := selections(req.GetSelections())
		if err != nil {
			return nil, err
		}
		req.Reset()
		if bytes > 0 {
			if !s.cfg.Budget.TryAcquire(pulls, bytes) {
				_, _, limit := s.cfg.Budget.Used()
				return nil, serving.TryLater(frame.ResourceExhausted, "selections: %d bytes to keep what is asked for; all pulls together have half of memory_bytes, which is %d; "+
					"select less, hold fewer ranges, or try again later", bytes, limit)
			}
			defer s.cfg.Budget.Release(pulls, bytes)
		}
		r, err := s.transferLog.begin(h.Session, w.kind)
		if err != nil {
			return nil, err
		}
		p := &pull{server: s, ctx: conn.Context(), record: r, sender: &transfer.Sender{Conn: w}}
		p.sender.Checksum = codec.Checksum(h.Checksum)
		p.sender.ChunkBytes = min(int64(h.MaxChunkBytes), int64(s.limits.ChunkBytes))
		if h.MaxChunkBytes == 0 {
			p.sender.ChunkBytes = min(1<<20, int64(s.limits.ChunkBytes))
		}
		p.sender.Codec = codec.Choose(codec.All(), h.Codecs)
		hello := frame.Hello{Version: frame.Version, Session: h.Session, MaxChunkBytes: s.limits.ChunkBytes, Checksum: h.Checksum}
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

// selections takes what a request selects out of it, or refuses it before anything is
// done for it. bytes is what it takes of the budget.
func selections(list []*pb.Selection) (all []wanted, bytes int64, err error) {
	bad := func(format string, args ...any) ([]wanted, int64, error) {
		return nil, 0, frame.Errorf(frame.InvalidArgument, format, args...)
	}
	switch n := len(list); {
	case n == 0:
		return bad("selections: none; name a tensor, a glob or a source")
	case n > transferTensors:
		return nil, 0, frame.Errorf(frame.ResourceExhausted, "selections: %d, the limit of a pull is %d; use several", n, transferTensors)
	}
	all = make([]wanted, len(list))
	for i, sel := range list {
		if err := store.CheckName(sel.GetName()); err != nil {
			return bad("selections[%d]: %v", i, err)
		}
		if problem := frame.CheckEntries("params", sel.GetParams()); problem != "" {
			return bad("selections[%d]: %s", i, problem)
		}
		if len(sel.GetParams()) > 0 && !sel.GetSource() {
			return bad("selections[%d]: params are for sources; set source, or leave them out", i)
		}
		if d := len(sel.GetHeldDigest()); d != 0 && d != len(codec.Digest{}) {
			return bad("selections[%d]: held_digest has %d bytes, a digest has %d", i, d, len(codec.Digest{}))
		}
		w := wanted{
			name: sel.GetName(), source: sel.GetSource(), params: sel.GetParams(), heldDigest: sel.GetHeldDigest(),
			held: make([]transfer.Range, len(sel.GetHeld())),
		}
		end := uint64(0)
		for j, r := range sel.GetHeld() {
			if r.GetLength() == 0 || r.GetOffset() < end || r.GetOffset() > math.MaxInt64 || r.GetLength() > math.MaxInt64-r.GetOffset() {
				return bad("selections[%d].held[%d]: bytes [%d,+%d); ranges hold a byte or more, ascend, do not overlap and end below 2^63", i, j, r.GetOffset(), r.GetLength())
			}
			end = r.GetOffset() + r.GetLength()
			w.held[j] = transfer.Range{Off: int64(r.GetOffset()), Len: int64(r.GetLength())}
		}
		all[i] = w
		bytes += w.bytes()
	}
	return all, max(0, bytes-pullFree), nil
}

// bytes is what a selection takes while the pull lasts.
func (w *wanted) bytes() int64 {
	n := selectionBytes + len(w.name) + rangeBytes*len(w.held)
	for k, v := range w.params {
		n += entryBytes + len(k) + len(v)
	}
	return int64(n)
}

// selection sends what one selection picks. What is wrong with it, or with one of
// its tensors, is a summary's to tell; an error is the stream's.
func (p *pull) selection(sel *wanted) error {
	name := sel.name
	if sel.source {
		src, ok := p.server.cfg.Sources.Lookup(name)
		if !ok {
			return p.refuse(name, fmt.Errorf("%w: no source %q", store.ErrNotFound, name))
		}
		var r store.Reader
		err := p.server.survive(func() (err error) {
			r, err = src(p.ctx, sel.params)
			return err
		})
		if err != nil {
			return p.refuse(name, err)
		}
		return p.tensor(name, r, sel)
	}
	if p.server.cfg.Store == nil {
		return p.refuse(name, errNoStore)
	}
	for t, err := range store.Pick(name, func() (picked, error) { return p.open(name) }, p.matching(name)) {
		switch {
		case err != nil && p.ctx.Err() != nil:
			return left(p.ctx)
		case err != nil:
			return p.refuse(name, err)
		case t.err != nil:
			err = p.refuse(t.name, t.err)
		case t.name == name: // what the client holds is of this one
			err = p.tensor(name, t.reader, sel)
		default:
			err = p.tensor(t.name, t.reader, &wanted{})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// picked is a tensor that a selection has picked.
type picked struct {
	name   string
	reader store.Reader
	err    error // why there is no reader
}

func (p *pull) open(name string) (picked, error) {
	r, err := p.server.cfg.Store.Open(p.ctx, name)
	return picked{name, r, err}, err
}

// matching opens every tensor whose name matches.
func (p *pull) matching(glob string) iter.Seq2[picked, error] {
	return func(yield func(picked, error) bool) {
		for info, err := range store.Each(p.ctx, p.server.cfg.Store, glob) {
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

// viewer lets a store's reader be read by a sender, while the pull lasts.
type viewer struct {
	ctx context.Context
	store.Reader
}

// View shares bytes of the tensor until held is released.
func (v viewer) View(off, n int64) ([]byte, interface{ Release() }, error) {
	return v.Reader.View(v.ctx, off, n)
}

// tensor sends one tensor, and what became of it.
func (p *pull) tensor(name string, r store.Reader, sel *wanted) error {
	defer r.Release()
	info := r.Info()
	size, err := info.Bytes()
	if err != nil {
		return p.refuse(name, err)
	}
	t := transfer.Tensor{Desc: frame.Desc{Tensor: session.NewID(), Desc: info.Desc, Name: name}, From: viewer{p.ctx, r}, Digest: info.Digest}
	if d := sel.heldDigest; len(d) == 0 || info.Digest.IsZero() || codec.Digest(d) == info.Digest {
		t.Held = sel.held
	}
	state := p.server.transferLog.tensor(p.record, t.Tensor, name, uint64(size))
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
		code, _ := statusParts(statusOf(err))
		p.server.core.TensorEnded(serving.Pull, code)
		return err // the record says how the transfer ended
	}
	if d, ok := r.(store.DigestKeeper); ok && info.Digest.IsZero() && !sum.Digest.IsZero() {
		d.Digested(sum.Digest) // a tensor that is pulled again is not hashed again
	}
	p.server.transferLog.over(state, sum)
	p.server.core.TensorEnded(serving.Pull, sum.Code)
	return p.sender.Control(frame.Frame{Summaries: []frame.Summary{sum}})
}

// refuse tells that a selection, or one tensor of it, is not sent.
func (p *pull) refuse(name string, err error) error {
	sum := frame.Summary{Tensor: session.NewID(), Name: name}
	p.explain(&sum, err)
	p.server.transferLog.over(p.server.transferLog.tensor(p.record, sum.Tensor, name, 0), sum)
	p.server.core.TensorEnded(serving.Pull, sum.Code)
	return p.sender.Control(frame.Frame{Summaries: []frame.Summary{sum}})
}

func (p *pull) explain(sum *frame.Summary, err error) {
	why := explainStored(err)
	sum.Digest, sum.Code, sum.Message, sum.RetryAfterMillis = codec.Digest{}, why.Code, why.Text, why.RetryMillis
	if why.Secret {
		p.server.log.Error("pull failed", slog.String("transfer", p.record.id.String()),
			slog.String("tensor", sum.Tensor.String()), slog.String("error", err.Error()))
	}
}
