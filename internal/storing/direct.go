package storing

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/internal/fault"
	"github.com/tensorferry/tensorferry/internal/serving"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// Direct is one tensor on its way into the store, or out of it or a source, without a session:
// for services beside the TensorService. It is admitted, drained and counted like a push or a
// pull of one tensor. It belongs to one goroutine, and ends with its context at the latest.
type Direct struct {
	Desc tensor.Desc
	transfer

	mu          sync.Mutex // guards all below
	writer      store.Writer
	reader      store.Reader
	size, moved int64 // bytes
	err         error
	forget      func() bool // the end of ctx; nil when it has ended
}

// Put reserves room for a tensor in the store. End must follow. The error is a *terms.RefusedError.
func (s *Service) Put(ctx context.Context, from *admission.Caller, name string, desc tensor.Desc) (*Direct, error) {
	return s.direct(ctx, serving.Push, from, func(d *Direct) (err error) {
		d.Desc = desc
		if d.size, err = desc.Bytes(); err != nil {
			return err
		}
		if s.Store == nil {
			return ErrNoStore
		}
		if d.size > s.StoredBytes {
			return fmt.Errorf("%w: %d bytes, the limit of a tensor is %d", tensor.ErrTooLarge, d.size, s.StoredBytes)
		}
		d.writer, _, err = s.create(d.ctx, d.cancel, name, desc, nil)
		return err
	})
}

// Get opens the tensor that a selection names, which is not a glob. End must follow. The error
// is a *terms.RefusedError.
func (s *Service) Get(ctx context.Context, from *admission.Caller, sel frame.Selection) (*Direct, error) {
	return s.direct(ctx, serving.Pull, from, func(d *Direct) (err error) {
		if bad := check([]frame.Selection{sel}); bad != nil {
			return bad
		}
		if d.reader, err = s.find(d.ctx, &sel); err != nil {
			return err
		}
		d.Desc = d.reader.Info().Desc
		d.size, err = d.Desc.Bytes()
		return err
	})
}

// direct admits a transfer, which begin begins.
func (s *Service) direct(ctx context.Context, kind serving.Direction, from *admission.Caller, begin func(d *Direct) error) (*Direct, error) {
	if err := s.Begin(); err != nil {
		return nil, err
	}
	t, err := s.enter(ctx, kind, from)
	if err != nil {
		s.End()
		return nil, err
	}
	d := &Direct{transfer: t}
	err = s.protect(func() error { return begin(d) })
	d.mu.Lock()
	d.forget = context.AfterFunc(ctx, func() { _ = d.End(context.Cause(ctx)) })
	d.mu.Unlock()
	if err != nil {
		return nil, d.End(err)
	}
	return d, nil
}

// Write copies data to the next bytes of the tensor that is put.
func (d *Direct) Write(data []byte) error {
	return d.move(data, func(off int64, p []byte) error { return d.writer.WriteViews(d.ctx, off, [][]byte{p}) })
}

// Read copies the next bytes of the tensor to data, as many as it has room for.
func (d *Direct) Read(data []byte) error {
	return d.move(data, func(off int64, p []byte) error {
		from, held, err := d.reader.View(d.ctx, off, int64(len(p)))
		if err != nil {
			return err
		}
		defer held.Release()
		if len(from) != len(p) {
			return fmt.Errorf("storing: %d bytes asked for at %d, got %d", len(p), off, len(from))
		}
		return fault.Guard(func() { copy(p, from) }) // it may be a file's
	})
}

// move moves data, which it borrows, piece by piece.
func (d *Direct) move(data []byte, piece func(off int64, p []byte) error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for p := range slices.Chunk(data, session.PieceBytes) {
		if d.forget == nil || d.ctx.Err() != nil {
			return cmp.Or(d.err, context.Cause(d.ctx), stream.ErrClosed)
		}
		if int64(len(p)) > d.size-d.moved {
			return frame.Errorf(frame.InvalidArgument, "bytes [%d,+%d) of a tensor of %d", d.moved, len(p), d.size)
		}
		if err := d.service.protect(func() error { return piece(d.moved, p) }); err != nil {
			return err
		}
		d.moved += int64(len(p))
	}
	return nil
}

// End ends the transfer, the first time: a tensor that is put becomes visible, durably if the
// store is durable, if err is nil and all has been written; otherwise it is discarded. The error
// is what the caller is told, a *terms.RefusedError.
func (d *Direct) End(err error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.forget == nil {
		return d.err
	}
	d.forget()
	d.forget = nil
	s, code := d.service, frame.OK
	if d.writer != nil {
		if err == nil && d.moved < d.size {
			err = frame.Errorf(frame.InvalidArgument, "only %d bytes of a tensor of %d came", d.moved, d.size)
		}
		if err == nil {
			err = s.protect(func() error { _, err := d.writer.Commit(d.ctx); return err })
		}
		s.discard(d.writer)
	}
	if d.reader != nil {
		_ = s.protect(func() error { d.reader.Release(); return nil })
	}
	if err != nil {
		why := s.Explain(cmp.Or(context.Cause(d.ctx), err)) // the cause outranks what it caused
		code, d.err = why.Code, why
	}
	d.cancel(stream.ErrClosed)
	s.TensorsEnded(d.kind, code, 1)
	d.leave(code, d.moved)
	s.Core.End()
	return d.err
}
