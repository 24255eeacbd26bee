package splitlearn

import (
	"errors"

	"google.golang.org/grpc/codes"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/terms"
)

// unimplemented is a code that sessions do not have. Their clients retry everything but this one,
// PERMISSION_DENIED, INVALID_ARGUMENT, NOT_FOUND and UNAUTHENTICATED.
const unimplemented = frame.Code(codes.Unimplemented)

// noPass says what theirs says.
func noPass(id string) error {
	return frame.Errorf(frame.NotFound, "'Activation %s not found in cache (may have expired or never cached)'", id)
}

func invalid(format string, args ...any) error {
	return frame.Errorf(frame.InvalidArgument, format, args...)
}

// refused returns an error whose code is FAILED_PRECONDITION, or nil: a model does not take its
// input, or its state does not allow a call.
func refused(err error) *terms.RefusedError {
	if r, ok := errors.AsType[*terms.RefusedError](err); ok && r.Code == frame.FailedPrecondition {
		return r
	}
	return nil
}
