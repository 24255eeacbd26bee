package failures

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

var (
	// ErrShutdown is the cause with which everything ends when a server is closed.
	ErrShutdown = errors.New("failures: shutting down")
	// ErrMemory is wrapped when the memory budget has no room for a request.
	ErrMemory = errors.New("failures: no room in the memory budget")
	// ErrPorts is wrapped when the inputs of a call do not match the model's ports.
	ErrPorts = errors.New("failures: inputs do not match the model")
)

// TryLater returns a refusal that may not recur later.
func TryLater(why reason.Reason, format string, args ...any) *terms.RefusedError {
	e := frame.Because(why, format, args...)
	return &terms.RefusedError{Code: e.Code, Reason: e.Reason, Text: e.Text, RetryMillis: retryMillis}
}

// Refusal returns a refusal that waiting does not change.
func Refusal(why reason.Reason, format string, args ...any) *terms.RefusedError {
	e := frame.Because(why, format, args...)
	return &terms.RefusedError{Code: e.Code, Reason: e.Reason, Text: e.Text}
}

// Rule says what a caller is told about an error.
type Rule struct {
	Err    error
	Why    reason.Reason // which has the code, and says whether to try again later
	Text   string        // "" means the error's own text
	Secret bool          // the cause belongs in the log
}

// Explain returns what the caller is told about an error, by the first rule that matches. A
// *terms.RefusedError or *frame.Error explains itself. An error that no rule matches is an
// internal error: its text may name files and addresses and goes only to the log.
func Explain(err error, rules []Rule) *terms.RefusedError {
	if own, ok := errors.AsType[*terms.RefusedError](err); ok {
		return own
	}
	if broken, ok := errors.AsType[*frame.Error](err); ok {
		return &terms.RefusedError{Code: broken.Code, Reason: broken.Reason, Text: broken.Text}
	}
	for _, r := range rules {
		if !errors.Is(err, r.Err) {
			continue
		}
		why := TryLater(r.Why, "%s", cmp.Or(r.Text, reason.Plain(err)))
		if why.Secret = r.Secret; !reason.Find(r.Why, "").Retry {
			why.RetryMillis = 0
		}
		return why
	}
	return &terms.RefusedError{Code: frame.Internal, Text: "internal error", Secret: true}
}

// callRules are the rules for calls. The order matters: the cause that ended a call's
// context outranks the errors it caused.
var callRules = []Rule{
	{Err: ErrMemory, Why: reason.Memory},
	{Err: slab.ErrMemory, Why: reason.Memory},
	{Err: ErrShutdown, Why: reason.ShuttingDown, Text: "server is shutting down"},
	{Err: context.Canceled, Why: "CANCELLED", Text: "call cancelled"},
	{Err: context.DeadlineExceeded, Why: reason.CallTimeout, Text: "the call's timeout has passed"},
	{Err: engine.ErrNotFound, Why: reason.ModelNotFound},
	{Err: engine.ErrInput, Why: reason.ModelInput},
	{Err: engine.ErrParam, Why: reason.ModelParam},
	{Err: engine.ErrPrecondition, Why: reason.ModelState},
	{Err: engine.ErrStateLost, Why: reason.StateLost},
	{Err: tensor.ErrTooLarge, Why: reason.TooLarge}, // also of an input
	{Err: ErrPorts, Why: reason.ModelPorts},
	{Err: slab.ErrBudget, Why: reason.Budget},
	{Err: engine.ErrUnavailable, Why: reason.ModelUnavailable},
}

// ExplainCall returns what the caller is told about the error of a call. The log has all of
// the failure of a model's own code.
func ExplainCall(err error) *terms.RefusedError {
	why := Explain(err, callRules)
	var public engine.PublicError
	var panicked *engine.PanicError
	if !why.Secret || !errors.Is(err, engine.ErrModel) {
		return why
	}
	why.Reason = reason.ModelFailed
	switch {
	case errors.As(err, &public):
		why.Text = "model failed: " + public.Public()
	case errors.As(err, &panicked):
		why.Text = fmt.Sprintf("model %q panicked; the server has the cause under the call's id", panicked.Model)
	default:
		why.Text = "model failed; the server has the cause under the call's id"
	}
	return why
}
