package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/tensor"
)

// Errors that callers can test for.
var (
	// ErrClosed is wrapped when the client or session was closed by its owner.
	ErrClosed = errors.New("client: closed")
	// ErrDraining is wrapped when the server takes no new calls: open a session on another
	// server, or later.
	ErrDraining = errors.New("client: server is draining")
	// ErrNoAnswer is wrapped when a server is silent for longer than OpenTimeout or
	// StallTimeout: it hangs, or is not a tensorferry server.
	ErrNoAnswer = errors.New("client: no answer")
	// ErrNoConnection is wrapped when nothing listens at the server's address, or it cannot
	// be reached.
	ErrNoConnection = errors.New("client: no connection")
	// ErrHostNotFound is wrapped when the host of the server's address cannot be resolved.
	ErrHostNotFound = errors.New("client: host not found")
	// ErrNotServer is wrapped when what answers is not a tensorferry server.
	ErrNotServer = errors.New("client: not a tensorferry server")
	// ErrInputIdle is wrapped when the caller's Reader, Next or Writer blocked for longer
	// than Config.InputIdle.
	ErrInputIdle = errors.New("client: input or output idle")
	// ErrInput is wrapped when an input, or a request, is invalid.
	ErrInput = errors.New("client: bad input")
	// ErrCircuitOpen is wrapped while Config.BreakAfter allows no attempt.
	ErrCircuitOpen = errors.New("client: too many attempts have failed")
)

// Error is the failure of a call, a session or a transfer. status.FromError returns its
// code.
type Error struct {
	Code       codes.Code
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
	if !e.Call.IsZero() && (e.Code == codes.Internal || e.Code == codes.Unknown) { // the server knows more
		return fmt.Sprintf("client: %s: %s (call %s)", e.Code, e.Message, e.Call)
	}
	return fmt.Sprintf("client: %s: %s", e.Code, e.Message)
}

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

// Retryable reports whether the same can succeed later. Whether something then happens twice is
// another question: see Refused.
func (e *Error) Retryable() bool {
	switch e.Code {
	case codes.Unavailable:
		return !errors.Is(e.Cause, ErrHostNotFound) && !errors.Is(e.Cause, ErrNotServer)
	case codes.DeadlineExceeded:
		return errors.Is(e.Cause, ErrNoAnswer)
	case codes.Aborted, codes.DataLoss:
		return true
	}
	return e.RetryAfter > 0
}

func retryable(err error) bool {
	own, ok := errors.AsType[*Error](err)
	return ok && own.Retryable()
}

// refused returns the error as that of a call that was not sent.
func (e *Error) refused() *Error {
	copied := *e
	copied.Refused = true
	return &copied
}

// with returns the error with something added to what it says.
func (e *Error) with(text string) *Error {
	copied := *e
	if copied.Message += text; e.Cause != nil {
		copied.Cause = fmt.Errorf("%w%s", e.Cause, text)
	}
	return &copied
}

func codeOf(err error) codes.Code { return status.Code(err) }

// noAnswer is the error of OpenTimeout.
func (c *Client) noAnswer() *Error {
	return &Error{Code: codes.DeadlineExceeded, Cause: fmt.Errorf("%w from %s within %v; is it a tensorferry server?", ErrNoAnswer, c.target, c.cfg.OpenTimeout)}
}

// causeError returns the error for what this side ended.
func causeError(cause error) *Error {
	if own, ok := errors.AsType[*Error](cause); ok {
		return own
	}
	if errors.Is(cause, context.DeadlineExceeded) || errors.Is(cause, ErrInputIdle) {
		return &Error{Code: codes.DeadlineExceeded, Cause: cause}
	}
	if errors.Is(cause, ErrInput) { // the caller's reader failed
		return &Error{Code: codes.InvalidArgument, Cause: cause}
	}
	return &Error{Code: codes.Canceled, Cause: cause}
}

// refused returns the error for what the server ended, or nil.
func refused(id tensor.ID, code frame.Code, text string, retryMillis uint32) error {
	if code == frame.OK {
		return nil
	}
	return &Error{Code: codes.Code(code.Known()), Message: text, RetryAfter: time.Duration(retryMillis) * time.Millisecond, Call: id}
}

// Conditions that gRPC reports only in its texts. No other texts are matched.
const (
	unsecured    = "authentication handshake failed: " // every such failure is UNAVAILABLE
	notConnected = "connection error: desc = "
	noProtocol   = "missing selected ALPN property" // TLS, but not for HTTP/2
	dialFailed   = "Error while dialing: "
	noPreface    = "error reading server preface" // not HTTP/2
	otherHTTP    = "unexpected HTTP status code received from server"
	otherType    = "transport: received unexpected content-type"
)

// unreachable is gRPC's error for an attempt to connect that failed.
func unreachable(says string, err error) error {
	return status.Error(codes.Unavailable, notConnected+says+err.Error())
}

// notSent reports whether an RPC failed for want of a connection.
func notSent(err error) bool {
	return status.Code(err) == codes.Unavailable && strings.Contains(err.Error(), notConnected)
}

// refusals are prefixes of handshake errors of identity and crypto/tls: one side refused
// the other. Any other text is about the connection.
var refusals = []string{"identity: ", "tls: ", "remote error: tls: ", "x509: "}

// sessionError returns why a session ended.
func (c *Client) sessionError(err error) *Error {
	var se *frame.Error
	var own *Error
	switch {
	case errors.As(err, &own):
		return own
	case errors.Is(err, ErrClosed), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return causeError(err)
	case errors.As(err, &se):
		return &Error{Code: codes.Code(se.Code), Message: se.Text}
	case errors.Is(err, session.ErrPeerClosed):
		return &Error{Code: codes.Unavailable, Message: "the server ended the session"}
	}
	st := status.Convert(err)
	e := &Error{Code: st.Code(), Message: st.Message()}
	for _, d := range st.Details() {
		if retry, ok := d.(*errdetails.RetryInfo); ok {
			e.RetryAfter = retry.GetRetryDelay().AsDuration()
		}
	}
	away, says := e.Code == codes.Unavailable, func(text string) bool { return strings.Contains(e.Message, text) }
	switch {
	case away && says(noPreface) && (says(noPreface+": EOF") || says("connection reset by peer") || says("broken pipe")):
		e.Cause = fmt.Errorf("%w: %s ends connections at once: an overloaded server does, one that is ending, or another kind of server", ErrNoConnection, c.target)
	case away && says(noPreface), away && says(noProtocol), says(otherHTTP), says(otherType),
		e.Code == codes.Unimplemented && !strings.HasPrefix(e.Message, "unknown method /"): // an older server says that
		e.Cause = fmt.Errorf("%w: %s", ErrNotServer, c.target)
	case away && says(unsecured):
		_, why, _ := strings.Cut(e.Message, unsecured)
		e.Message = strings.TrimSuffix(strings.TrimPrefix(why, "identity: "), `"`)
		if slices.ContainsFunc(refusals, func(r string) bool { return strings.HasPrefix(why, r) }) {
			e.Code = codes.Unauthenticated
		}
	case away && says(dialFailed) && says(": lookup "):
		e.Cause = fmt.Errorf("%w: %s", ErrHostNotFound, c.target)
	case away && says(dialFailed):
		_, why, _ := strings.Cut(e.Message, dialFailed)
		e.Cause = fmt.Errorf("%w: %s", ErrNoConnection, strings.TrimSuffix(why, `"`))
	}
	return e
}
