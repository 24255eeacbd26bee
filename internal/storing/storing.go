// Package storing serves pushes to a store, and pulls from a store and from sources, over
// frames. Any service may use it, on the Core of internal/serving.
//
// It does not know gRPC or keep tensors (stores do). A Service is safe for concurrent use.
// It owns no payload bytes: pushed ones are copied to the store, pulled ones are shared
// from it.
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
var errKept = serving.TryLater(frame.ResourceExhausted, "memory: not enough to keep what this push announces; announce fewer tensors at a time, or try again later")

// errPanic replaces the panic of a store or a source.
var errPanic = errors.New("storing: panic")

// Config configures a Service. Every field except Store is required.
type Config struct {
	Core        *serving.Core
	Store       store.Store // nil means none
	Sources     *store.Sources
	Budget      *slab.Budget
	Log         *slog.Logger
	Limits      stream.Limits // for frames and chunks
	StoredBytes int64         // the largest tensor pushed
	MemoryWait  time.Duration // limit of the wait for room in the store
	// Status returns the code and the text for an error of a connection.
	Status func(error) (frame.Code, string)
}

// Conn carries the frames of a push or a pull.
type Conn interface {
	serving.Conn
	Context() context.Context // the context of its RPC
	// Take reports whether bytes may be kept, in total, of what the peer has said.
	Take(bytes int64) bool
	// Excuse makes unread data count as sent just now. It is safe for concurrent use.
	Excuse()
}

// Service serves pushes and pulls. Create one with New.
type Service struct {
	Config
	log                    transferLog
	full, absent, failures serving.LogSampler
}

// New returns a Service.
func New(c Config) *Service { return &Service{Config: c} }

// State returns the state of a push or a pull; false if it is not known.
func (s *Service) State(id tensor.ID) (State, bool) { return s.log.state(id) }

// Waits handles the message of a pull's client that it waits for the consumer of its
// output.
func (s *Service) Waits(id tensor.ID) { s.log.waits(id) }

// transfer runs work on a goroutine of its own, because only the end of the RPC wakes one
// that waits for its peer, and returns the error with which the RPC ends. The goroutine
// ends soon after that; the core's Wait waits for it.
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
		default: // already expired
		}
	})
	ended := make(chan error, 1)
	var before atomic.Pointer[error] // why the RPC ended before the work
	s.Core.Go(func() {               // ends after its RPC
		var r *record
		err := s.survive(func() (err error) {
			r, err = work(w)
			return err
		})
		w.timer.Stop()
		// When gRPC refuses a message, it ends the RPC before the work learns why.
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

// broken reports whether err says that the client broke a rule, not only that its RPC is
// over.
func broken(err error) bool {
	bad, ok := errors.AsType[*frame.Error](err)
	return ok && bad.Code != frame.Cancelled && bad.Code != frame.DeadlineExceeded
}

// survive calls f, which may be a user's code, and converts a panic to an error.
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

// rules say what a client is told about an error of a store, a source or a transfer.
var rules = []serving.Rule{
	{Err: store.ErrNotFound, Code: frame.NotFound},
	{Err: slab.ErrBudget, Code: frame.ResourceExhausted}, // first: the error may also wrap one about the request
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
	// Before the errors that it may wrap; its text may name machines.
	{Err: store.ErrUnavailable, Code: frame.Unavailable, Text: "the server's store is not available now; try again later", Retry: true, Secret: true},
	{Err: syscall.EMFILE, Code: frame.Unavailable, Text: outOfFiles, Retry: true, Secret: true},
	{Err: syscall.ENFILE, Code: frame.Unavailable, Text: outOfFiles, Retry: true, Secret: true},
	{Err: context.Canceled, Code: frame.Cancelled, Text: "the transfer was cancelled"},
	{Err: context.DeadlineExceeded, Code: frame.DeadlineExceeded, Text: "no room for the tensor in time", Retry: true},
}

// Explain returns what a summary says about an error of a store, a source or a transfer. It
// logs what the summary omits, with attrs.
func (s *Service) Explain(err error, attrs ...slog.Attr) *serving.RefusedError {
	why := serving.Explain(err, rules)
	var public engine.PublicError
	attrs = append(attrs, slog.Any("error", err))
	switch {
	case !why.Secret:
	case why.Code == frame.Unavailable: // it may last, and every request fails
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
