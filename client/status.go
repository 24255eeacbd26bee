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

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/calling"
	"github.com/tensorferry/tensorferry/internal/session"
	"github.com/tensorferry/tensorferry/reason"
)

// Errors that callers can test for.
var (
	// ErrClosed is wrapped when the client or session was closed by its owner.
	ErrClosed = errors.New("client: the session is closed")
	// ErrDraining is wrapped when the server takes no new calls: open a session on another
	// server, or later.
	ErrDraining = calling.Causes.Draining
	// ErrNoAnswer is wrapped when a server is silent for longer than OpenTimeout or
	// StallTimeout: it hangs, or is not a tensorferry server.
	ErrNoAnswer = calling.Causes.NoAnswer
	// ErrNoConnection is wrapped when nothing listens at the server's address, or it cannot
	// be reached.
	ErrNoConnection = reason.New(reason.NoConnection, "client: no connection")
	// ErrHostNotFound is wrapped when the host of the server's address cannot be resolved.
	ErrHostNotFound = reason.New(reason.HostNotFound, "client: host not found")
	// ErrNotServer is wrapped when what answers is not a tensorferry server.
	ErrNotServer = reason.New(reason.NotServer, "client: not a tensorferry server")
	// ErrInputIdle is wrapped when the caller's Reader, Next or Writer blocked for longer
	// than Config.InputIdle.
	ErrInputIdle = calling.Causes.InputIdle
	// ErrInput is wrapped when an input, or a request, is invalid.
	ErrInput = calling.Causes.Input
	// ErrCircuitOpen is wrapped while Config.BreakAfter allows no attempt.
	ErrCircuitOpen = reason.New(reason.CircuitOpen, "client: too many attempts have failed")
)

// Error is the failure of a call, a session or a transfer. status.FromError returns its
// code.
type Error = calling.Error

// noAnswer is the error of OpenTimeout.
func (c *Client) noAnswer() *Error {
	return calling.Failed(fmt.Errorf("%w from %s within %v; is it a tensorferry server?", ErrNoAnswer, c.target, c.cfg.OpenTimeout))
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
		return own.Refused
	}
	return status.Code(err) == codes.Unavailable && strings.Contains(err.Error(), notConnected)
}

// notDialed returns the error of an attempt to connect.
func (c *Client) notDialed(err error) *Error {
	if _, ok := errors.AsType[*net.DNSError](err); ok {
		return calling.Failed(fmt.Errorf("%w: %s", ErrHostNotFound, c.target))
	}
	return calling.Failed(fmt.Errorf("%w: %w", ErrNoConnection, err))
}

// notSecured returns the error of a handshake. Whatever is not about the connection says that
// one side refused the other.
func notSecured(err error) *Error {
	alert := alertOf(err)
	_, network := errors.AsType[net.Error](err)
	e := &Error{Code: codes.Unauthenticated, Reason: reason.Of(err), Message: strings.TrimPrefix(err.Error(), "identity: ")}
	switch {
	case alert != nil && alert.Error() == errCertificateRequired.Error():
		e.Reason = reason.CertRequired
	case alert == nil && (network || hungUp(err) || errors.Is(err, context.Canceled)):
		e.Code = codes.Unavailable
	}
	return e
}

// errCertificateRequired is the alert with which a server of TLS 1.3 refuses a client without a
// certificate (RFC 8446, section 6).
const errCertificateRequired tls.AlertError = 116

// alertOf returns the alert with which the peer ended a connection, or nil.
func alertOf(err error) error {
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "remote error" { // as crypto/tls has it
		return op.Err
	}
	return nil
}

// notAnswered returns the error of a connection whose peer has said nothing.
func (c *Client) notAnswered(err error) *Error {
	if alertOf(err) != nil { // the handshake's last word
		return notSecured(fmt.Errorf("the server ended the handshake: %w", err))
	}
	if hungUp(err) {
		return calling.Failed(fmt.Errorf("%w: %s ends connections at once: an overloaded server does, one that is ending, or another kind of server", ErrNoConnection, c.target))
	}
	return c.notServer()
}

func (c *Client) notServer() *Error {
	return calling.Failed(fmt.Errorf("%w: %s", ErrNotServer, c.target))
}

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
		return calling.CauseError(err)
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
