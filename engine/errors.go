package engine

import (
	"fmt"
	"runtime/debug"
)

// PanicError is a panic in a model's own code. It wraps ErrModel. Stack is for logs alone.
type PanicError struct {
	Model string
	Value any
	Stack []byte
}

// Error returns one line, without the stack.
func (e *PanicError) Error() string {
	return fmt.Sprintf("%v: %q panicked: %v", ErrModel, e.Model, e.Value)
}

// Unwrap returns ErrModel.
func (e *PanicError) Unwrap() error { return ErrModel }

// PublicError is a model's failure that its caller may read. A server passes Public on; the
// text of any other failure may name files or carry data, and only goes to the log.
type PublicError interface {
	error
	// Public returns a sentence without secrets.
	Public() string
}

// Publicf makes a PublicError, for a model's own code to return.
func Publicf(format string, args ...any) error {
	return publicError(fmt.Sprintf(format, args...))
}

type publicError string

// Error returns what Public does.
func (e publicError) Error() string { return string(e) }

// Public implements PublicError.
func (e publicError) Public() string { return string(e) }

// Recovered is deferred around a model's own code: its panic becomes a PanicError.
func Recovered(model string, err *error) {
	if v := recover(); v != nil {
		*err = &PanicError{model, v, debug.Stack()}
	}
}
