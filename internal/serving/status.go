package serving

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

// errMemory is wrapped when the memory budget has no room for a request.
var errMemory = errors.New("serving: no room in the memory budget")

// errDraining refuses new work while the server drains.
var errDraining error = TryLater(frame.Unavailable, "server is draining; use another one, or try again later")

// TryLater returns a refusal that may not recur later.
func TryLater(code frame.Code, format string, args ...any) *terms.RefusedError {
	return &terms.RefusedError{Code: code, Text: fmt.Sprintf(format, args...), RetryMillis: retryMillis}
}

// Rule says what a caller is told about an error.
type Rule struct {
	Err    error
	Code   frame.Code
	Text   string // "" means the error's own text
	Retry  bool
	Secret bool // the cause belongs in the log
}

// Explain returns what the caller is told about an error, by the first rule that matches. A
// *terms.RefusedError or *frame.Error explains itself. An error that no rule matches is an
// internal error: its text may name files and addresses and goes only to the log.
func Explain(err error, rules []Rule) *terms.RefusedError {
	if own, ok := errors.AsType[*terms.RefusedError](err); ok {
		return own
	}
	if broken, ok := errors.AsType[*frame.Error](err); ok {
		return &terms.RefusedError{Code: broken.Code, Text: broken.Text}
	}
	for _, r := range rules {
		if !errors.Is(err, r.Err) {
			continue
		}
		why := &terms.RefusedError{Code: r.Code, Text: cmp.Or(r.Text, err.Error()), Secret: r.Secret}
		if r.Retry {
			why.RetryMillis = retryMillis
		}
		return why
	}
	return &terms.RefusedError{Code: frame.Internal, Text: "internal error", Secret: true}
}

// callRules are the rules for calls. The order matters: the cause that ended a call's
// context outranks the errors it caused.
var callRules = []Rule{
	{Err: errMemory, Code: frame.ResourceExhausted, Retry: true},
	{Err: slab.ErrMemory, Code: frame.ResourceExhausted, Retry: true},
	{Err: ErrShutdown, Code: frame.Unavailable, Text: "server is shutting down", Retry: true},
	{Err: context.Canceled, Code: frame.Cancelled, Text: "call cancelled"},
	{Err: context.DeadlineExceeded, Code: frame.DeadlineExceeded, Text: "the call's timeout has passed"},
	{Err: engine.ErrNotFound, Code: frame.NotFound},
	{Err: engine.ErrInput, Code: frame.FailedPrecondition},
	{Err: engine.ErrParam, Code: frame.InvalidArgument},
	{Err: engine.ErrPrecondition, Code: frame.FailedPrecondition},
	{Err: tensor.ErrTooLarge, Code: frame.ResourceExhausted}, // also of an input
	{Err: errBinding, Code: frame.InvalidArgument},
	{Err: slab.ErrBudget, Code: frame.ResourceExhausted},
	{Err: engine.ErrUnavailable, Code: frame.Unavailable, Retry: true},
}

// ExplainCall returns what the caller is told about the error of a call. The log has all of
// the failure of a model's own code.
func ExplainCall(err error) *terms.RefusedError {
	why := Explain(err, callRules)
	var public engine.PublicError
	var panicked *engine.PanicError
	switch {
	case !why.Secret || !errors.Is(err, engine.ErrModel):
	case errors.As(err, &public):
		why.Text = "model failed: " + public.Public()
	case errors.As(err, &panicked):
		why.Text = fmt.Sprintf("model %q panicked; the server has the cause under the call's id", panicked.Model)
	default:
		why.Text = "model failed; the server has the cause under the call's id"
	}
	return why
}
