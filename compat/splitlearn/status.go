package splitlearn

import (
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/server"
)

// Codes that sessions do not have. Their clients retry everything but these two, INVALID_ARGUMENT,
// NOT_FOUND and UNAUTHENTICATED.
const (
	permissionDenied = frame.Code(codes.PermissionDenied)
	unimplemented    = frame.Code(codes.Unimplemented)
)

// errNoTraining and noPass say what theirs say.
var errNoTraining = refuse(frame.FailedPrecondition, "Training mode not enabled on server")

func noPass(id string) error {
	return refuse(frame.NotFound, "'Activation %s not found in cache (may have expired or never cached)'", id)
}

func invalid(format string, args ...any) error { return refuse(frame.InvalidArgument, format, args...) }

func refuse(code frame.Code, format string, args ...any) error {
	return &server.RefusedError{Code: code, Text: fmt.Sprintf(format, args...)}
}

// refused returns an error whose code is FAILED_PRECONDITION, or nil: a model does not take its
// input, or its state does not allow a call.
func refused(err error) *server.RefusedError {
	if r, ok := errors.AsType[*server.RefusedError](err); ok && r.Code == frame.FailedPrecondition {
		return r
	}
	return nil
}
