package client

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/tensor"
)

// Errors that callers can test for.
var (
	// ErrClosed is wrapped when the client or session was closed by its owner.
	ErrClosed = errors.New("client: the session is closed")
	// ErrDraining is wrapped when the server takes no new calls: open a session on another
	// server, or later.
	ErrDraining = reason.New(reason.Draining, "client: server is draining")
	// ErrNoAnswer is wrapped when a server is silent for longer than OpenTimeout or
	// StallTimeout: it hangs, or is not a tensorferry server.
	ErrNoAnswer = reason.New(reason.NoAnswer, "client: no answer")
	// ErrNoConnection is wrapped when nothing listens at the server's address, or it cannot
	// be reached.
	ErrNoConnection = reason.New(reason.NoConnection, "client: no connection")
	// ErrHostNotFound is wrapped when the host of the server's address cannot be resolved.
	ErrHostNotFound = reason.New(reason.HostNotFound, "client: host not found")
	// ErrNotServer is wrapped when what answers is not a tensorferry server.
	ErrNotServer = reason.New(reason.NotServer, "client: not a tensorferry server")
	// ErrInputIdle is wrapped when the caller's Reader, Next or Writer blocked for longer
	// than Config.InputIdle.
	ErrInputIdle = reason.New(reason.InputIdle, "client: input or output idle")
	// ErrInput is wrapped when an input, or a request, is invalid.
	ErrInput = reason.New(reason.Input, "client: bad input")
	// ErrCircuitOpen is wrapped while Config.BreakAfter allows no attempt.
	ErrCircuitOpen = reason.New(reason.CircuitOpen, "client: too many attempts have failed")
)

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
	away  bool  // there was no connection
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

// Row returns what package reason says of the failure.
func (e *Error) Row() reason.Row { return reason.Find(e.Reason, frame.Code(e.Code).String()) }

// Retryable reports whether the same can succeed later. Whether something then happens twice is
// another question: see Refused.
func (e *Error) Retryable() bool { return e.RetryAfter > 0 || e.Row().Retry }

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
	return failed(fmt.Errorf("%w from %s within %v; is it a tensorferry server?", ErrNoAnswer, c.target, c.cfg.OpenTimeout))
}

// causeError returns the error for what this side ended.
func causeError(cause error) *Error {
	if own, ok := errors.AsType[*Error](cause); ok {
		return own
	}
	switch {
	case errors.Is(cause, context.DeadlineExceeded):
		return &Error{Code: codes.DeadlineExceeded, Cause: cause}
	case reason.Of(cause) != "":
		return failed(cause)
	}
	return &Error{Code: codes.Canceled, Cause: cause}
}

// failed returns the error for a cause that carries a reason.
func failed(cause error) *Error {
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

// Conditions that gRPC reports only in its texts. No other texts are matched, and a test
// provokes each.
const (
	notConnected = "connection error: desc = "      // the connection that the RPC waited for
	noProtocol   = "missing selected ALPN property" // TLS, but not for HTTP/2
	noPreface    = "error reading server preface"   // not HTTP/2
	otherHTTP    = "unexpected HTTP status code received from server"
	otherType    = "transport: received unexpected content-type"
)

// notSent reports whether an RPC failed for want of a connection.
func notSent(err error) bool {
	if own, ok := errors.AsType[*Error](err); ok {
		return own.away
	}
	return status.Code(err) == codes.Unavailable && strings.Contains(err.Error(), notConnected)
}

// notDialed returns the error of an attempt to connect.
func (c *Client) notDialed(err error) *Error {
	if _, ok := errors.AsType[*net.DNSError](err); ok {
		return failed(fmt.Errorf("%w: %s", ErrHostNotFound, c.target))
	}
	return failed(fmt.Errorf("%w: %w", ErrNoConnection, err))
}

// notSecured returns the error of a handshake. Whatever is not about the connection says that
// one side refused the other.
func notSecured(err error) *Error {
	alert, alerted := errors.AsType[tls.AlertError](err)
	_, network := errors.AsType[net.Error](err)
	e := &Error{Code: codes.Unauthenticated, Reason: reason.Of(err), Message: strings.TrimPrefix(err.Error(), "identity: ")}
	switch {
	case alert == certificateRequired:
		e.Reason = reason.CertRequired
	case !alerted && (network || hungUp(err) || errors.Is(err, context.Canceled)):
		e.Code = codes.Unavailable
	}
	return e
}

// certificateRequired is the alert with which a server of TLS 1.3 refuses a client without a
// certificate (RFC 8446, section 6).
const certificateRequired tls.AlertError = 116

// notAnswered returns the error of a connection whose peer has said nothing.
func (c *Client) notAnswered(err error) *Error {
	if _, ok := errors.AsType[tls.AlertError](err); ok { // the handshake's last word
		return notSecured(fmt.Errorf("the server ended the handshake: %w", err))
	}
	if hungUp(err) {
		return failed(fmt.Errorf("%w: %s ends connections at once: an overloaded server does, one that is ending, or another kind of server", ErrNoConnection, c.target))
	}
	return c.notServer()
}

func (c *Client) notServer() *Error { return failed(fmt.Errorf("%w: %s", ErrNotServer, c.target)) }

func hungUp(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

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
		return &Error{Code: codes.Code(se.Code), Reason: se.Reason, Message: se.Text}
	case errors.Is(err, session.ErrPeerClosed):
		return &Error{Code: codes.Unavailable, Message: "the server ended the session"}
	}
	st := status.Convert(err)
	e := &Error{Code: st.Code(), Message: st.Message()}
	for _, d := range st.Details() {
		switch d := d.(type) {
		case *errdetails.RetryInfo:
			e.RetryAfter = d.GetRetryDelay().AsDuration()
		case *errdetails.ErrorInfo:
			if d.GetDomain() == reason.Domain {
				e.Reason = reason.Parse(d.GetReason())
			}
		}
	}
	away, says := e.Code == codes.Unavailable, func(text string) bool { return strings.Contains(e.Message, text) }
	if away && (says(noPreface) || says(noProtocol)) || says(otherHTTP) || says(otherType) ||
		e.Code == codes.Unimplemented && !strings.HasPrefix(e.Message, "unknown method /") { // an older server says that
		return c.notServer()
	}
	return e
}
