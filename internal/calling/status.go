package calling

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/tensor"
)

// Causes are errors of package client, which says what they mean.
var Causes = struct{ Draining, NoAnswer, InputIdle, Input error }{
	Draining:  reason.New(reason.Draining, "client: server is draining"),
	NoAnswer:  reason.New(reason.NoAnswer, "client: no answer"),
	InputIdle: reason.New(reason.InputIdle, "client: input or output idle"),
	Input:     reason.New(reason.Input, "client: bad input"),
}

// Error is the failure of a call, a session or a transfer. status.FromError returns its
// code.
type Error struct {
	Code       codes.Code
	Reason     reason.Reason // one of package reason, or empty if the code says it all
	Message    string        // of the server, or empty where there is a Cause
	RetryAfter time.Duration // 0 unless waiting helps
	Cause      error         // what happened on this side, if anything
	Call       tensor.ID     // the call, push or pull that failed; zero if it was none
	Refused    bool          // nothing of the call was run, so that nothing happens twice when it is repeated

	until error // what ended the wait for another attempt, if anything
}

// Error returns the cause, or else code and message.
func (e *Error) Error() string {
	if e.Cause != nil {
		return "client: " + strings.TrimPrefix(e.Cause.Error(), "client: ")
	}
	return fmt.Sprintf("client: %s: %s", e.Code, e.Plain())
}

// Plain returns what the error says to people.
func (e *Error) Plain() string {
	switch {
	case e.Cause != nil:
		return reason.Plain(e.Cause)
	case !e.Call.IsZero() && (e.Code == codes.Internal || e.Code == codes.Unknown): // the server knows more
		return fmt.Sprintf("%s (call %s)", e.Message, e.Call)
	}
	return e.Message
}

// Why returns the reason, or that of the cause.
func (e *Error) Why() reason.Reason { return cmp.Or(e.Reason, reason.Of(e.Cause)) }

// Is reports whether target is the error of a context that says what the code says, as a timeout
// of the server's does, or that ended while the client waited for another attempt.
func (e *Error) Is(target error) bool {
	return target == context.DeadlineExceeded && e.Code == codes.DeadlineExceeded || target == context.Canceled && e.Code == codes.Canceled ||
		e.until != nil && errors.Is(e.until, target)
}

// Unwrap returns the cause on this side.
func (e *Error) Unwrap() error { return e.Cause }

// GRPCStatus returns the failure as a gRPC status.
func (e *Error) GRPCStatus() *status.Status { return status.New(e.Code, e.Error()) }

// Row returns what package reason says of the failure.
func (e *Error) Row() reason.Row { return reason.Find(e.Why(), frame.Code(e.Code).String()) }

// Retryable reports whether the same can succeed later. Whether something then happens twice is
// another question: see Refused.
func (e *Error) Retryable() bool { return e.RetryAfter > 0 || e.Row().Retry }

// Retryable reports whether an Error can succeed later.
func Retryable(err error) bool {
	own, ok := errors.AsType[*Error](err)
	return ok && own.Retryable()
}

// AsRefused returns the error as that of a call that was not sent.
func AsRefused(e *Error) *Error {
	copied := *e
	copied.Refused = true
	return &copied
}

// Wait records what ended the wait for another attempt.
func Wait(e *Error, until error) { e.until = until }

// CodeOf returns the code of an error.
func CodeOf(err error) codes.Code { return status.Code(err) }

// textOf returns what an error says, without the code if it is a gRPC status.
func textOf(err error) string { return status.Convert(err).Message() }

// CauseError returns the error for what this side ended.
func CauseError(cause error) *Error {
	if own, ok := errors.AsType[*Error](cause); ok {
		return own
	}
	switch {
	case errors.Is(cause, context.DeadlineExceeded):
		return &Error{Code: codes.DeadlineExceeded, Cause: cause}
	case reason.Of(cause) != "":
		return Failed(cause)
	}
	return &Error{Code: codes.Canceled, Cause: cause}
}

// Failed returns the error for a cause that carries a reason.
func Failed(cause error) *Error {
	why := reason.Of(cause)
	return &Error{Code: codes.Code(frame.CodeOf(why)), Reason: why, Cause: cause}
}

// refused returns the error for what the server ended, or nil.
func refused(id tensor.ID, code frame.Code, why reason.Reason, text string, retryMillis uint32) error {
	if code == frame.OK {
		return nil
	}
	return &Error{Code: codes.Code(code.Known()), Reason: why, Message: text, RetryAfter: time.Duration(retryMillis) * time.Millisecond, Call: id}
}

// ErrorsOf joins the errors of summaries.
func ErrorsOf(list []Summary) error {
	all := make([]error, len(list))
	for i := range list {
		all[i] = list[i].Err
	}
	return errors.Join(all...)
}

// SummaryError returns the error that a summary reports, or nil.
func SummaryError(s *frame.Summary) error {
	text := s.Message
	if name := strconv.Quote(s.Name); !strings.Contains(text, name) {
		text = "tensor " + name + ": " + text
	}
	return refused(s.Call, s.Code, s.Reason, text, s.RetryAfterMillis)
}
