package storing

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/serving"
	"github.com/tensorferry/tensorferry/internal/transfer"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
)

// ErrNoStore is returned for requests that need a store, on a server without one.
var ErrNoStore = &frame.Error{Code: frame.FailedPrecondition, Text: "this server has no store; start one with --store"}

// push is a client's upload into the store.
type push struct {
	service *Service
	conn    *idleTimeout
	ctx     context.Context
	record  *record
	holder  *slab.Principal // for the budget

	committing sync.WaitGroup
	slots      chan struct{} // holds a token for each running commit

	mu        sync.Mutex
	summaries []frame.Summary // guarded by mu
	failed    bool            // one of the summaries is not OK; guarded by mu
}

// place is the destination of one pushed tensor.
type place struct {
	ctx    context.Context // of the push
	name   string
	writer store.Writer
	state  *progress
	table  int64 // bytes acquired from the budget for the chunk table
}

// WriteViews copies views to byte off of the tensor.
func (p *place) WriteViews(off int64, views [][]byte) error {
	return p.writer.WriteViews(p.ctx, off, views)
}

// Push stores the tensors that arrive over conn. answer sends their summaries; the client's
// idle timeout applies to it.
func (s *Service) Push(from *serving.Caller, conn Conn, answer func([]frame.Summary) error) error {
	return s.transfer(from, conn, serving.Push, func(w *idleTimeout) (*record, error) {
		if s.Store == nil {
			return nil, ErrNoStore
		}
		defer w.Free()
		f, err := s.receive(w)
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
		if f == nil || f.Hello == nil {
			return nil, frame.Errorf(frame.InvalidArgument, "the first frame has no hello; a push begins with one")
		}
		h := f.Hello
		if bad := h.Check(); bad != nil {
			return nil, bad
		}
		r, err := s.log.begin(h.Session, w.kind, nil)
		if err != nil {
			return nil, err
		}
		p := &push{
			service: s, conn: w, ctx: conn.Context(), record: r, holder: slab.NewPrincipal("push " + h.Session.String()), slots: make(chan struct{}, commits),
		}
		if err := p.serve(f); err != nil {
			return r, err
		}
		return r, w.sending(func() error { return answer(p.summaries) })
	})
}

// receive waits for the next frame. An error is io.EOF or a *frame.Error.
func (s *Service) receive(w *idleTimeout) (*frame.Frame, error) {
	f, err := w.Recv()
	var bad *frame.Error
	if err == nil || errors.Is(err, io.EOF) || errors.As(err, &bad) {
		return f, err
	}
	if w.Context().Err() != nil {
		return nil, left(w.Context())
	}
	code, text := s.Status(err) // gRPC's own
	return nil, &frame.Error{Code: code, Text: text}
}

// left returns why the RPC of a transfer ended early.
func left(ctx context.Context) *frame.Error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return &frame.Error{Code: frame.DeadlineExceeded, Text: "the client's deadline passed before the transfer ended; use a longer one"}
	}
	return &frame.Error{Code: frame.Cancelled, Text: "the client cancelled the transfer or disconnected"}
}

// serve processes the client's frames, of which f is the first, up to the last one, and
// waits until the tensors are stored.
func (p *push) serve(f *frame.Frame) error {
	s := p.service
	recv := transfer.Receiver[*place]{
		ChunkBytes: s.Limits.ChunkBytes, TensorBytes: s.StoredBytes,
		OpenTensors: min(s.Limits.OpenTensors, PushTensors), Tensors: Tensors,
		Checksum: codec.Checksum(f.Hello.Checksum), Codecs: codec.All(), Handler: p,
	}
	defer p.committing.Wait()
	defer func() { // a store's code may panic
		if r := recover(); r != nil {
			recv.Fail(errPanic)
			panic(r)
		}
	}()
	if err := p.frames(&recv, f); err != nil {
		recv.Fail(err)
		return err
	}
	recv.End()
	return nil
}

// frames processes frames up to the last one, or until a tensor has failed and none is
// open: the client then learns at once, rather than after sending the rest in vain.
func (p *push) frames(recv *transfer.Receiver[*place], f *frame.Frame) (err error) {
	kept := int64(0)
	for first := true; ; first = false {
		for i := range f.Descs {
			kept += pushedBytes + int64(len(f.Descs[i].Name))
		}
		if len(f.Descs) > 0 && !p.conn.Take(kept) {
			return errKept
		}
		if part, why := foreign(f, first); part != "" {
			recv.Fail(&frame.Error{Code: frame.InvalidArgument, Text: part + " ended the push"})
			return &frame.Error{Code: frame.InvalidArgument, Text: part + " came" + why}
		}
		if err := recv.Frame(f); err != nil {
			return err
		}
		p.conn.Free()
		if recv.Open() == 0 && p.hasFailed() {
			return nil
		}
		if f, err = p.service.receive(p.conn); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// foreign returns a part of a frame that a client must not send, and the reason.
func foreign(f *frame.Frame, first bool) (part, why string) {
	switch {
	case f.Hello != nil && !first:
		return "a second hello", "; a push has only one"
	case len(f.Summaries) > 0:
		return "a summary", " from the client; only a server sends summaries"
	}
	return "", ""
}

func (p *push) hasFailed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.failed
}

// Begin begins the record of a tensor. An invalid name is not kept: it may have 64 KiB.
func (p *push) Begin(t *transfer.In[*place]) *place {
	p.conn.Opened()
	pl := &place{ctx: p.ctx}
	if store.CheckName(t.Name) == nil {
		pl.name = t.Name
	}
	pl.state = p.service.log.tensor(p.record, t.Tensor, pl.name, t.SizeBytes)
	return pl
}

// Open reserves room for a tensor.
func (p *push) Open(t *transfer.In[*place]) (err error) {
	s, pl := p.service, t.Place
	if err := store.CheckName(t.Name); err != nil {
		return err
	}
	table := serving.TableBytes(t.Geo.Count())
	if err := serving.AcquireTable(s.Budget, p.holder, table); err != nil {
		return err
	}
	pl.table = table
	ctx, cancel := context.WithTimeout(p.ctx, s.MemoryWait)
	defer cancel()
	pl.writer, err = s.Store.Create(ctx, t.Name, t.Desc.Desc)
	return err
}

// Moved records progress.
func (p *push) Moved(t *transfer.In[*place], bytes int64) {
	p.conn.rewind()
	t.Place.state.bytes.Add(bytes)
	p.record.bytes.Add(bytes)
}

// Whole commits the tensor, while the next one arrives.
func (p *push) Whole(t *transfer.In[*place]) {
	p.slots <- struct{}{} // each commit ends with the disk's answer
	p.committing.Go(func() {
		defer func() { <-p.slots }()
		var info store.Info
		err := p.service.survive(func() (err error) {
			info, err = t.Place.writer.Commit(p.ctx)
			return err
		})
		if err != nil {
			p.Failed(t, err)
			return
		}
		p.end(t, frame.Summary{Digest: info.Digest, Durable: info.Durable})
	})
}

// Failed discards what was received of a tensor.
func (p *push) Failed(t *transfer.In[*place], err error) {
	if t.Place.writer != nil {
		t.Place.writer.Abort()
	}
	why := p.service.Explain(err, slog.String("push", p.record.id.String()), slog.String("tensor", t.Tensor.String()))
	if errors.Is(err, store.ErrFull) {
		if n, due := p.service.full.Again(); due {
			p.service.Log.Warn("tensors refused: the store is full", slog.Int64("refused", n))
		}
	}
	p.end(t, frame.Summary{Code: why.Code, Message: why.Text, RetryAfterMillis: why.RetryMillis})
}

func (p *push) end(t *transfer.In[*place], s frame.Summary) {
	if n := t.Place.table; n > 0 {
		p.service.Budget.Release(p.holder, n)
	}
	s.Tensor, s.Name, s.SizeBytes = t.Tensor, t.Place.name, t.SizeBytes
	p.service.log.over(t.Place.state, s)
	p.service.Core.TensorEnded(serving.Push, s.Code)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.summaries = append(p.summaries, s)
	p.failed = p.failed || s.Code != frame.OK
}
