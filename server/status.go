package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/fault"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/internal/transfer"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

var (
	// errInternal is what a peer learns of a defect.
	errInternal = status.Error(codes.Internal, "internal error")
	// errUnknownService is gRPC's answer for a name whose health is not known.
	errUnknownService = status.Error(codes.NotFound, "unknown service")
)

// codeName names a code as docs/errors.md does. A peer may say any number: those
// after the last one are one name, or the metrics would grow with them.
func codeName(c frame.Code) string {
	if _, known := code.Code_name[int32(c)]; !known {
		c = frame.Code(code.Code_UNKNOWN)
	}
	return code.Code(c).String()
}

// statusName names the code that an RPC ends with.
func statusName(err error) string { return codeName(frame.Code(status.Code(err))) }

// errDraining refuses a session for good.
var errDraining = tryLater(codes.Unavailable, "server is draining; go to another one, or come back later")

// errSessions refuses a session while limit others are open.
func errSessions(limit int) error {
	return tryLater(codes.ResourceExhausted, "open sessions: the limit of the server is %d", limit)
}

// errSilent ends a stream of requests of which none came for so long.
func errSilent(idle time.Duration) error {
	return status.Errorf(codes.DeadlineExceeded, "no request came for %v; open the RPC again when there is one", idle)
}

// brief cuts the text of what an RPC ends with: peers bound what lies in headers.
func brief(err error) error {
	st := status.Convert(err)
	if len(st.Message()) <= frame.TextBytes {
		return err
	}
	p := st.Proto()
	p.Message = wire.Text(p.GetMessage())
	return status.ErrorProto(p)
}

// levelOf is at what level the end of an RPC is logged. A peer can have as many
// refused as it likes: those are for who debugs.
func levelOf(err error) slog.Level {
	switch status.Code(err) {
	case codes.Internal, codes.Unknown, codes.DataLoss:
		return slog.LevelInfo
	}
	return slog.LevelDebug
}

// sessionStatus is what a session's RPC ends with.
func sessionStatus(err error) error {
	var se *frame.Error
	switch {
	case err == nil, errors.Is(err, session.ErrPeerClosed):
		return nil
	case errors.As(err, &se):
		return status.Error(codes.Code(se.Code), se.Text)
	case errors.Is(err, errShutdown):
		return tryLater(codes.Unavailable, "server is shutting down")
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return status.FromContextError(err).Err()
	}
	if st, ok := status.FromError(err); ok { // grpc's own
		return st.Err()
	}
	return errInternal
}

// errTransfers refuses a push or a pull while limit others are open.
func errTransfers(limit int) error {
	return tryLater(codes.ResourceExhausted, "open transfers: the limit of the server is %d", limit)
}

// errTransferExists refuses a name that an open transfer has.
func errTransferExists(id tensor.ID) error {
	return status.Errorf(codes.AlreadyExists, "transfer %s is open already; use a new id", id)
}

// errCalls refuses a call while limit others are open.
func errCalls(limit int) error {
	return tryLater(codes.ResourceExhausted, "calls: the limit of the server is %d; try again later", limit)
}

// statusParts takes apart what an RPC ends with.
func statusParts(err error) (frame.Code, string) {
	st := status.Convert(err)
	return frame.Code(st.Code()), st.Message()
}

// unaryStatus is what an RPC of one message each way ends with, by the code and
// text of a call or a tensor.
func unaryStatus(code frame.Code, text string, retry uint32) error {
	if code == frame.OK {
		return nil
	}
	if retry > 0 {
		return tryLater(codes.Code(code), "%s", text)
	}
	return status.Error(codes.Code(code), text)
}

// storedCode turns an error of a store, a source or a transfer into what a summary
// says. What a peer may not read stays here; known is false and the log has it.
func storedCode(err error) (code frame.Code, text string, retry uint32, known bool) {
	var se *frame.Error
	var public engine.PublicError
	switch {
	case errors.As(err, &se):
		return se.Code, se.Text, 0, true
	case errors.Is(err, store.ErrNotFound):
		return frame.NotFound, err.Error(), 0, true
	case errors.Is(err, slab.ErrBudget), errors.Is(err, tensor.ErrTooLarge): // before what was given: it may be both
		return frame.ResourceExhausted, err.Error(), 0, true
	case errors.Is(err, store.ErrName), errors.Is(err, store.ErrGlob), errors.Is(err, store.ErrParams),
		errors.Is(err, tensor.ErrShape), errors.Is(err, tensor.ErrDataType), errors.Is(err, codec.ErrDecode):
		return frame.InvalidArgument, err.Error(), 0, true
	case errors.Is(err, store.ErrFull):
		return frame.ResourceExhausted, err.Error(), retryMillis, true
	case errors.Is(err, store.ErrExists):
		return frame.AlreadyExists, err.Error(), 0, true
	case errors.Is(err, store.ErrPart):
		return frame.FailedPrecondition, err.Error(), 0, true
	case errors.Is(err, transfer.ErrCorrupt), errors.Is(err, fault.ErrVanished):
		return frame.DataLoss, err.Error(), 0, true
	case errors.Is(err, store.ErrClosed), errors.Is(err, errShutdown):
		return frame.Unavailable, "server is shutting down", retryMillis, true
	case errors.Is(err, store.ErrUnavailable): // before what it may wrap; the text may name machines
		return frame.Unavailable, "the server's store is not available now; try again later", retryMillis, false
	case errors.Is(err, context.Canceled):
		return frame.Cancelled, "the transfer was cancelled", 0, true
	case errors.Is(err, context.DeadlineExceeded):
		return frame.DeadlineExceeded, "no room for the tensor in time", retryMillis, true
	case errors.As(err, &public):
		return frame.Internal, public.Public(), 0, true
	}
	return frame.Internal, "internal error", 0, false
}

// tryLater is a refusal that waiting may help against.
func tryLater(code codes.Code, format string, args ...any) error {
	st := status.Newf(code, format, args...)
	if with, err := st.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(retryDelay)}); err == nil {
		st = with
	}
	return st.Err()
}

// callCode turns an engine's error into what done says. Order matters: a cause
// that ended the call's context outranks what it caused. Texts of unknown errors,
// and of models' own, stay here: they may name files and addresses.
func callCode(err error) (frame.Code, string, uint32) {
	switch {
	case errors.Is(err, errMemoryWait), errors.Is(err, errRequestMemory):
		return frame.ResourceExhausted, err.Error(), retryMillis
	case errors.Is(err, errShutdown):
		return frame.Unavailable, "server is shutting down", retryMillis
	case errors.Is(err, context.Canceled):
		return frame.Cancelled, "call cancelled", 0
	case errors.Is(err, context.DeadlineExceeded):
		return frame.DeadlineExceeded, "the call's timeout has passed", 0
	case errors.Is(err, engine.ErrNotFound):
		return frame.NotFound, err.Error(), 0
	case errors.Is(err, engine.ErrInput):
		return frame.FailedPrecondition, err.Error(), 0
	case errors.Is(err, errBinding):
		return frame.InvalidArgument, err.Error(), 0
	case errors.Is(err, slab.ErrBudget), errors.Is(err, tensor.ErrTooLarge):
		return frame.ResourceExhausted, err.Error(), 0
	case errors.Is(err, engine.ErrUnavailable):
		return frame.Unavailable, err.Error(), retryMillis
	case errors.Is(err, engine.ErrModel):
		return frame.Internal, modelText(err), 0
	}
	return frame.Internal, "internal error", 0
}

// modelText is what a peer may read of the failure of a model's own code. The log
// has all of it (call.finish).
func modelText(err error) string {
	var public engine.PublicError
	var panicked *engine.PanicError
	switch {
	case errors.As(err, &public):
		return "model failed: " + public.Public()
	case errors.As(err, &panicked):
		return fmt.Sprintf("model %q panicked; the server's log has the cause under the call's id", panicked.Model)
	}
	return "model failed; the server's log has the cause under the call's id"
}
