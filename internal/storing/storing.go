// Package storing serves the puts and gets of sessions: it brings tensors into a store, and
// sends those of a store and of sources. PushTensors and PullTensors are sessions with one
// call, whose frames flow one way.
//
// It does not know gRPC or keep tensors (stores do). A Service is safe for concurrent use.
// It owns no payload bytes but those on their way into a store that is not memory.
package storing

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"syscall"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/internal/failures"
	"github.com/tensorferry/tensorferry/internal/fault"
	"github.com/tensorferry/tensorferry/internal/serving"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

var (
	// errPanic replaces the panic of a store or a source.
	errPanic = errors.New("storing: panic")
	// errLeft is why a put or a get ends with its call.
	errLeft = &frame.Error{Code: frame.Cancelled, Text: "the client cancelled the transfer or disconnected"}
)

// Service serves puts and gets for a Core, in whose memory tensors wait. Core, Store and
// Sources do not change after it has begun.
type Service struct {
	*serving.Core
	Store   store.Store // nil means none
	Sources *store.Sources
	Evicted atomic.Int64 // tensors that the store has evicted to make room for others
	Damaged atomic.Int64 // tensors that clients have found damaged and that were sent whole

	log                    transferLog
	full, absent, failures admission.LogSampler
	evictions              admission.LogSampler
}

// Available reports whether the store can be used; why it cannot goes to the log.
func (s *Service) Available(ctx context.Context) bool {
	err := s.protect(func() error { _, err := s.Store.List(ctx, "", "", 0); return err })
	if err != nil {
		_ = s.Explain(err)
	}
	return err == nil
}

// transfer is what a put, a get and a Direct have in common: how it is admitted, ends and is
// counted.
type transfer struct {
	service *Service
	kind    serving.Direction
	from    *admission.Caller // nil if its session counts as the transfer
	ctx     context.Context
	cancel  context.CancelCauseFunc
}

// enter admits a transfer, whose context ends with ctx at the latest. leave must follow.
func (s *Service) enter(ctx context.Context, kind serving.Direction, from *admission.Caller) (t transfer, err error) {
	if from != nil {
		if err := s.EnterTransfer(kind, from); err != nil {
			return t, err
		}
	}
	t = transfer{service: s, kind: kind, from: from}
	t.ctx, t.cancel = context.WithCancelCause(ctx)
	return t, nil
}

// leave counts how the transfer ended.
func (t *transfer) leave(code frame.Code, bytes int64) {
	t.service.TransferEnded(t.kind, code, bytes)
	if t.from != nil {
		t.service.LeaveTransfer(t.kind, t.from)
	}
}

// task is what a put and a get of a session have in common.
type task struct {
	transfer
	session *serving.Session
	id      tensor.ID
	record  *record
	memory  *slab.Account // for what it keeps beside its tensors
	ready   int64         // tensors of a set that are received: counted with its end
}

// Task begins a put or a get, or finishes its call; the session is locked.
func (s *Service) Task(on *serving.Session, m *stream.Machine, _ stream.Instant, part *frame.Call) serving.Task {
	t, err := s.begin(on, part)
	if err != nil {
		why := s.Explain(err)
		d := why.Done()
		d.Call = part.ID
		m.Finish(d)
		return nil
	}
	if part.Put != nil {
		return &put{task: t, all: part.Put.All, slots: make(chan struct{}, commits), next: make(chan *incoming), tensors: make(map[tensor.ID]*incoming)}
	}
	g := &get{
		task: t, list: part.Get.Selections, most: feedTensors,
		sizes: make(map[tensor.ID]int64), lost: make(map[tensor.ID]error), news: make(session.News, 1), ended: make(chan struct{}),
	}
	if on.OneWay() { // one after the other
		g.most = 1
	}
	s.Go(g.run)
	return g
}

// begin admits a put or a get.
func (s *Service) begin(on *serving.Session, part *frame.Call) (t task, err error) {
	kind := serving.Pull
	if part.Put != nil {
		kind = serving.Push
		_, sets := s.Store.(store.Sets)
		switch {
		case s.Store == nil:
			return t, ErrNoStore
		case part.Put.All && !sets:
			return t, frame.Errorf(frame.FailedPrecondition, "this server's store cannot store several tensors together; put them one by one")
		}
	} else if bad := check(part.Get.Selections); bad != nil {
		return t, bad
	}
	from := on.From
	if on.OneWay() {
		from = nil
	}
	t.session, t.id, t.memory = on, part.ID, s.Budget.Account(on.Holder)
	if t.transfer, err = s.enter(on.Values, kind, from); err != nil {
		return t, err
	}
	if t.record, err = s.log.begin(part.ID, kind, on, part.Put != nil && part.Put.All, s.PrincipalOf(on.Values)); err != nil {
		t.cancel(err)
		t.leave(frame.AlreadyExists, 0)
	}
	return t, err
}

// finish decides how the call ends; the session is locked.
func (t *task) finish(m *stream.Machine, d frame.Done) {
	d.Call = t.id
	t.recordEnd(d.Code, d.Message)
	m.Finish(d)
}

// recordEnd records how the call ended: the first time counts. The session is locked.
func (t *task) recordEnd(code frame.Code, text string) {
	if t.service.log.end(t.record, code, text) {
		t.leave(code, t.record.bytes.Load())
		if t.ready > 0 {
			t.service.TensorsEnded(t.kind, code, t.ready)
		}
	}
}

// failed returns the Summary of a tensor that failed.
func (t *task) failed(sum frame.Summary, err error) frame.Summary {
	why := t.service.Explain(err, slog.String(string(t.kind), t.id.String()), slog.String("tensor", sum.Tensor.String()))
	sum.Digest, sum.Code, sum.Message, sum.RetryAfterMillis, sum.Reason = codec.Digest{}, why.Code, why.Text, why.RetryMillis, why.Reason
	return sum
}

// summarize ends a tensor; the session is locked.
func (t *task) summarize(m *stream.Machine, now stream.Instant, state *progress, sum frame.Summary) {
	sum.Call = t.id
	t.service.log.tensorEnded(state, sum)
	if t.record.all && sum.Code == frame.OK {
		t.ready++
	} else {
		t.service.TensorsEnded(t.kind, sum.Code, 1)
	}
	m.Summarize(now, sum)
}

// closed handles the last event of the call; the session is locked.
func (t *task) closed(e stream.Event) {
	t.cancel(errLeft)
	t.recordEnd(e.Code, e.Text)
}

// protect calls f, which may be a user's code, and converts a panic to an error.
func (s *Service) protect(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			s.Panicked(p)
			err = errPanic
		}
	}()
	return f()
}

const outOfFiles = "the server has no file descriptors left; try again later"

// rules say what a client is told about an error of a store, a source or a transfer.
var rules = []failures.Rule{
	{Err: store.ErrNotFound, Why: reason.TensorNotFound},
	{Err: store.ErrTooSmall, Why: reason.StoreTooSmall},
	{Err: store.ErrDiskFull, Why: reason.DiskFull},
	{Err: slab.ErrBudget, Why: reason.Budget}, // first: the error may also wrap one about the request
	{Err: tensor.ErrTooLarge, Why: reason.TooLarge},
	{Err: store.ErrName, Why: reason.BadName},
	{Err: store.ErrMetadata, Why: reason.BadName},
	{Err: store.ErrGlob, Why: reason.BadName},
	{Err: store.ErrParams, Why: reason.BadSource},
	{Err: tensor.ErrShape, Why: "INVALID_ARGUMENT"},
	{Err: tensor.ErrDataType, Why: "INVALID_ARGUMENT"},
	{Err: codec.ErrDecode, Why: "INVALID_ARGUMENT"},
	{Err: store.ErrFull, Why: reason.StoreFull},
	{Err: slab.ErrMemory, Why: reason.Memory},
	{Err: store.ErrExists, Why: reason.TensorExists},
	{Err: store.ErrPart, Why: reason.TensorInFile},
	{Err: store.ErrReadOnly, Why: reason.StoreReadOnly},
	{Err: store.ErrUnwritable, Why: reason.StoreUnwritable, Text: "the server's store cannot be written; its log says why", Secret: true},
	{Err: fault.ErrVanished, Why: reason.TensorVanished},
	{Err: store.ErrClosed, Why: reason.ShuttingDown, Text: "server is shutting down"},
	{Err: failures.ErrShutdown, Why: reason.ShuttingDown, Text: "server is shutting down"},
	// Before the errors that it may wrap; its text may name machines.
	{Err: store.ErrUnavailable, Why: reason.StoreUnavailable, Text: "the server's store is not available now; try again later", Secret: true},
	{Err: syscall.EMFILE, Why: reason.Files, Text: outOfFiles, Secret: true},
	{Err: syscall.ENFILE, Why: reason.Files, Text: outOfFiles, Secret: true},
	{Err: context.Canceled, Why: "CANCELLED", Text: "the transfer was cancelled"},
	{Err: context.DeadlineExceeded, Why: reason.StoreSlow, Text: "no room for the tensor in time"},
}

// Explain returns what a summary says about an error of a store, a source or a transfer. It
// logs what the summary omits, with attrs.
func (s *Service) Explain(err error, attrs ...slog.Attr) *terms.RefusedError {
	why := failures.Explain(err, rules)
	var public engine.PublicError
	attrs = append(attrs, slog.Any("error", err))
	switch {
	case errors.Is(err, store.ErrFull):
		s.full.Log(s.Log, slog.LevelWarn, "tensors refused: the store is full", "refused")
	case !why.Secret:
	case why.Code == frame.Unavailable: // it may last, and every request fails
		s.absent.Log(s.Log, slog.LevelError, "store is not available", "refused", attrs...)
	case errors.As(err, &public):
		return &terms.RefusedError{Code: frame.Internal, Text: public.Public()}
	default:
		s.failures.Log(s.Log, slog.LevelError, "store failed", "failures", attrs...)
	}
	return why
}
