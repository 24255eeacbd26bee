package wire

import (
	"errors"
	"fmt"
)

// Errors that callers decide on. Every error of this package wraps one of them.
var (
	// ErrMalformed is wrapped when bytes are no frame or request of this protocol, or
	// when a frame cannot be written as one.
	ErrMalformed = errors.New("wire: malformed frame")
	// ErrTooLarge is wrapped when a frame or a request holds more than a limit of this
	// package.
	ErrTooLarge = errors.New("wire: frame over limit")
)

// FieldError tells which part of a frame broke the contract and how.
type FieldError struct {
	Kind  error  // ErrMalformed or ErrTooLarge
	Field string // path of the field, as in calls[0].id
	Want  string // what the contract promises
	Got   string // what was there
}

// Error says field, promised and got.
func (e *FieldError) Error() string {
	return fmt.Sprintf("%v: %s: want %s, got %s", e.Kind, e.Field, e.Want, e.Got)
}

// Unwrap returns the kind.
func (e *FieldError) Unwrap() error { return e.Kind }

func tooLarge(field, unit string, limit, got int) *FieldError {
	return &FieldError{ErrTooLarge, field, fmt.Sprintf("at most %d %s", limit, unit), fmt.Sprint(got)}
}
