package server

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/internal/failures"
	"github.com/tensorferry/tensorferry/internal/inbound"
	"github.com/tensorferry/tensorferry/internal/serving"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/internal/wire"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/terms"
)

var (
	// errInternal is what a peer learns of a defect.
	errInternal = status.Error(codes.Internal, "internal error")
	// errUnknownService is gRPC's answer for a name whose health is not known.
	errUnknownService = status.Error(codes.NotFound, "unknown service")
	// errRenamed ends the RPC of a sender who has another name now.
	errRenamed = errors.New("your credentials are those of another principal now; send the RPC again")
	// errReceived ends an RPC, or refuses one, for want of memory for its messages.
	errReceived = failures.TryLater(reason.Memory, "memory: none for what clients have sent; read results, have fewer RPCs open, and try again later")
)

// full tells the client of a connection beyond the limit so.
func full(most int) func(net.Conn) {
	st := status.Convert(statusOf(failures.TryLater(reason.Connections, "overload: all %d connections that the server takes are open; try again later", most)))
	return func(conn net.Conn) { identity.Refuse(conn, nil, st.Proto()) }
}

// errNotReceived ends an RPC of which no message, or none more, is received.
func errNotReceived(why error, method string) error {
	large, ok := errors.AsType[*inbound.TooLargeError](why)
	if !ok {
		return errReceived
	}
	if large.Takes > 0 {
		return frame.Errorf(frame.ResourceExhausted, "message of %d bytes takes %d bytes of memory with its copies; one may take %d, which are three quarters of receive_bytes", large.Bytes, large.Takes, large.Most)
	}
	hint := ""
	if method == pb.TensorService_Compute_FullMethodName {
		hint = "; larger tensors go by StreamTensors, in chunks"
	}
	return frame.Errorf(frame.ResourceExhausted, "message of %d bytes; at most %d are received%s", large.Bytes, large.Most, hint)
}

// statusName names the code that an RPC ends with.
func statusName(err error) string { return frame.Code(status.Code(err)).String() }

// endOf is what an RPC ends with whose handler returned err: what its peer was told outweighs
// that, and a handler that was cancelled after the deadline was so for that reason.
func endOf(ctx context.Context, err error) error {
	if why := rpcOf(ctx).told.Load(); why != nil {
		return statusOf(*why)
	}
	if end, ok := ctx.Deadline(); ok && status.Code(err) == codes.Canceled && !time.Now().Before(end) {
		return statusOf(context.DeadlineExceeded)
	}
	return err
}

// errSilent ends an RPC of which no request came for so long.
func errSilent(idle time.Duration) error {
	return status.Errorf(codes.DeadlineExceeded, "no request came for %v; open the RPC again when there is one", idle)
}

// errNoMethod refuses an RPC that no service has.
func errNoMethod(name string) error {
	return status.Errorf(codes.Unimplemented, "unknown method %s", wire.Text(name))
}

// errUnauthenticated refuses an RPC of a caller who is unknown, or may not send any.
func errUnauthenticated(why error) error {
	if _, known := errors.AsType[*terms.RefusedError](why); known { // but must not send RPCs
		return statusOf(why)
	}
	return statusOf(&terms.RefusedError{Code: frame.Code(codes.Unauthenticated), Reason: reason.Of(why), Text: wire.Text(reason.Plain(why))})
}

// endWith ends an RPC whose handler may wait for a message: gRPC has no other way to say
// why than this method of its own stream. With its context an RPC ends as CANCELLED.
func endWith(s grpc.ServerTransportStream, why error) {
	if s, ok := s.(interface{ WriteStatus(*status.Status) error }); ok {
		_ = s.WriteStatus(status.Convert(statusOf(why))) // or it is over
	}
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

// levelOf is at what level the end of an RPC, or of a session, is logged. A peer can have
// as many refused as it likes: those go to debug level, as do those of many failures that
// are not to be logged.
func levelOf(err error, failures *admission.LogSampler) slog.Level {
	switch status.Code(err) {
	case codes.Internal, codes.Unknown, codes.DataLoss:
		if _, due := failures.Again(); due {
			return slog.LevelInfo
		}
	}
	return slog.LevelDebug
}

// receiveError is the error of grpc's RecvMsg, of which the peer has been told by then.
// INTERNAL says that its bytes are no message: one that is cut short, or compressed though
// nothing is. That is no defect. What the peer was told already outweighs it.
func receiveError(ctx context.Context, err error) error {
	if why := rpcOf(ctx).told.Load(); why != nil && err != nil {
		return *why
	}
	switch st, _ := status.FromError(err); st.Code() {
	case codes.Internal:
		return frame.Errorf(frame.InvalidArgument, "%s", st.Message())
	case codes.ResourceExhausted:
		return frame.Errorf(frame.ResourceExhausted, "%s", st.Message())
	}
	return err
}

// statusOf is what an RPC ends with: the one place where errors become statuses.
func statusOf(err error) error {
	var broken *frame.Error
	var refused *terms.RefusedError
	switch {
	case err == nil, errors.Is(err, session.ErrPeerClosed), errors.Is(err, serving.ErrServed):
		return nil
	case errors.As(err, &broken):
		refused = &terms.RefusedError{Code: broken.Code, Reason: broken.Reason, Text: broken.Text}
	case errors.As(err, &refused):
	case errors.Is(err, failures.ErrShutdown):
		refused = failures.TryLater(reason.ShuttingDown, "server is shutting down")
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return status.FromContextError(err).Err()
	default:
		if st, ok := status.FromError(err); ok { // grpc's own
			return st.Err()
		}
		return errInternal
	}
	var details []protoadapt.MessageV1
	if refused.RetryMillis > 0 {
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(time.Duration(refused.RetryMillis) * time.Millisecond)})
	}
	if refused.Reason != "" {
		details = append(details, &errdetails.ErrorInfo{Reason: string(refused.Reason), Domain: reason.Domain})
	}
	st := status.New(codes.Code(refused.Code), refused.Text)
	if with, err := st.WithDetails(details...); err == nil {
		st = with
	}
	return st.Err()
}

// ownStatus returns a handler's own status as a refusal; nil if err is none.
func ownStatus(err error) *terms.RefusedError {
	if st, ok := status.FromError(err); ok && err != nil {
		return &terms.RefusedError{Code: frame.Code(st.Code()), Text: st.Message()}
	}
	return nil
}

// statusParts takes apart what an RPC ends with.
func statusParts(err error) (frame.Code, string) {
	st := status.Convert(statusOf(err))
	return frame.Code(st.Code()), st.Message()
}
