// Package storing serves pushes into a store, and pulls from it and from sources, over
// frames: for whatever service asks, on the Core of internal/serving.
//
// It refuses to know gRPC and to keep tensors (stores do). A Service is safe for
// concurrent use. It owns no payload bytes: pushed ones go where the store says, pulled
// ones are shared from it.
package storing

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/fault"
	"github.com/tensorferry/tensorferry/internal/serving"
	"github.com/tensorferry/tensorferry/internal/transfer"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// errKept ends a push that would keep more than there is memory for.
var errKept = serving.TryLater(frame.ResourceExhausted, "memory: none to keep what this push announces; announce fewer tensors at a time, or try again later")

// errPanic is what a panic of a store or a source becomes.
var errPanic = errors.New("storing: panic")

// Config of a Service. Every field is needed, but for Store.
type Config struct {
	Core        *serving.Core
	Store       store.Store // nil: there is none
	Sources     *store.Sources
	Budget      *slab.Budget
	Log         *slog.Logger
	Limits      stream.Limits // of frames and chunks
	StoredBytes int64         // the largest tensor pushed
	MemoryWait  time.Duration // for room in the store
	// Status is the code and the text of what a connection failed with.
	Status func(error) (frame.Code, string)
}

// Conn carries the frames of a push or a pull.
type Conn interface {
	serving.Conn
	Context() context.Context // that of its RPC
	// Take reports whether so many bytes may be kept, in all, of what the peer has said.
	Take(bytes int64) bool
	// Excuse has what was sent and lies unread taken for sent just now. It is safe for
	// concurrent use.
	Excuse()
}

// Service serves pushes and pulls. Make one with New.
type Service struct {
	Config
	log                    transferLog
	full, absent, failures serving.LogSampler
}

// New returns a Service.
func New(c Config) *Service { return &Service{Config: c} }

// State returns how a push or a pull goes, or went; false if it is not known.
func (s *Service) State(id tensor.ID) (State, bool) { return s.log.state(id) }

// Waits notes that the client of a pull says that it waits for whoever takes its output.
func (s *Service) Waits(id tensor.ID) { s.log.waits(id) }

// transfer has the work of a transfer done on a goroutine of its own, since nothing
// but the end of the RPC wakes one that waits for its peer, and returns what the RPC
// ends with. The work ends soon after; the core's Wait waits for it.
func (s *Service) transfer(from *serving.Caller, conn Conn, k serving.Direction, work func(*idleTimeout) (*record, error)) error {
	if err := s.Core.Begin(); err != nil {
		return err
	}
	defer s.Core.End()
	if err := s.Core.Enter(serving.Transfers, from); err != nil {
		return err
	}
	s.Core.TransferOpened(k)

	expired := make(chan struct{}, 1)
	w := newIdleTimeout(conn, k, s.Limits, func() {
		select {
		case expired <- struct{}{}:
		default: // it expired before
		}
	})
	ended := make(chan error, 1)
	var before atomic.Pointer[error] // why the RPC has ended before the work
	s.Core.Go(func() {               // ends when its RPC has
		var r *record
		err := s.survive(func() (err error) {
			r, err = work(w)
			return err
		})
		w.timer.Stop()
		// gRPC ends an RPC whose message it refuses before the work is told why.
		if first := before.Load(); first != nil && !broken(err) {
			err = *first
		}
		code, text := s.Status(err)
		var bytes int64
		if r != nil {
			s.log.end(r, code, text)
			bytes = r.bytes.Load()
		}
		s.Core.Leave(serving.Transfers, from)
		s.Core.TransferEnded(k, code, bytes)
		ended <- err
	})
	var err error
	select {
	case err = <-ended:
		return err
	case <-expired:
		err = w.err()
	case <-conn.Context().Done():
		err = context.Cause(conn.Context())
	case <-s.Core.Done():
		err = serving.ErrShutdown
	}
	before.Store(&err)
	return err
}

// broken reports whether err is a rule that the client broke, not that its RPC is over.
func broken(err error) bool {
	bad, ok := errors.AsType[*frame.Error](err)
	return ok && bad.Code != frame.Cancelled && bad.Code != frame.DeadlineExceeded
}

// survive runs code that may be a user's and makes an error of its panic.
func (s *Service) survive(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			s.Core.Panicked(p)
			err = errPanic
		}
	}()
	return f()
}

const outOfFiles = "the server has no file descriptors left; try again later"

// rules say what a client is told of an error of a store, a source or a transfer.
var rules = []serving.Rule{
	{Err: store.ErrNotFound, Code: frame.NotFound},
	{Err: slab.ErrBudget, Code: frame.ResourceExhausted}, // before what was given: it may be both
	{Err: tensor.ErrTooLarge, Code: frame.ResourceExhausted},
	{Err: store.ErrName, Code: frame.InvalidArgument},
	{Err: store.ErrGlob, Code: frame.InvalidArgument},
	{Err: store.ErrParams, Code: frame.InvalidArgument},
	{Err: tensor.ErrShape, Code: frame.InvalidArgument},
	{Err: tensor.ErrDataType, Code: frame.InvalidArgument},
	{Err: codec.ErrDecode, Code: frame.InvalidArgument},
	{Err: store.ErrFull, Code: frame.ResourceExhausted, Retry: true},
	{Err: slab.ErrMemory, Code: frame.ResourceExhausted, Retry: true},
	{Err: store.ErrExists, Code: frame.AlreadyExists},
	{Err: store.ErrPart, Code: frame.FailedPrecondition},
	{Err: store.ErrReadOnly, Code: frame.FailedPrecondition},
	{Err: store.ErrUnwritable, Code: frame.FailedPrecondition, Text: "the server's store cannot be written; its log says why", Secret: true},
	{Err: transfer.ErrCorrupt, Code: frame.DataLoss},
	{Err: fault.ErrVanished, Code: frame.DataLoss},
	{Err: store.ErrClosed, Code: frame.Unavailable, Text: "server is shutting down", Retry: true},
	{Err: serving.ErrShutdown, Code: frame.Unavailable, Text: "server is shutting down", Retry: true},
	// Before what it may wrap; its text may name machines.
	{Err: store.ErrUnavailable, Code: frame.Unavailable, Text: "the server's store is not available now; try again later", Retry: true, Secret: true},
	{Err: syscall.EMFILE, Code: frame.Unavailable, Text: outOfFiles, Retry: true, Secret: true},
	{Err: syscall.ENFILE, Code: frame.Unavailable, Text: outOfFiles, Retry: true, Secret: true},
	{Err: context.Canceled, Code: frame.Cancelled, Text: "the transfer was cancelled"},
	{Err: context.DeadlineExceeded, Code: frame.DeadlineExceeded, Text: "no room for the tensor in time", Retry: true},
}

// Explain turns an error of a store, a source or a transfer into what a summary says,
// and logs what that leaves out, with attrs.
func (s *Service) Explain(err error, attrs ...slog.Attr) *serving.RefusedError {
	why := serving.Explain(err, rules)
	var public engine.PublicError
	attrs = append(attrs, slog.Any("error", err))
	switch {
	case !why.Secret:
	case why.Code == frame.Unavailable: // for a while, to whoever asks
		if n, due := s.absent.Again(); due {
			s.Log.LogAttrs(context.Background(), slog.LevelError, "store is not available", append(attrs, slog.Int64("refused", n))...)
		}
	case errors.As(err, &public):
		return &serving.RefusedError{Code: frame.Internal, Text: public.Public()}
	default:
		if n, due := s.failures.Again(); due {
			s.Log.LogAttrs(context.Background(), slog.LevelError, "store failed", append(attrs, slog.Int64("failures", n))...)
		}
	}
	return why
}
