package engine

import (
	"fmt"
	"runtime/debug"
	"strings"
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

// Trace returns where it panicked, and the stack.
func (e *PanicError) Trace() (place, trace string) {
	lines := strings.Split(string(e.Stack), "\n")
	for i, l := range lines {
		if strings.HasPrefix(l, "panic(") && i+3 < len(lines) {
			lines = lines[i+2:] // a function and its place take a line each
			break
		}
	}
	for len(lines) >= 4 && strings.HasPrefix(lines[0], "runtime.") {
		lines = lines[2:]
	}
	if len(lines) > 1 {
		place, _, _ = strings.Cut(strings.TrimSpace(lines[1]), " +0x")
	}
	return place, string(e.Stack)
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

// TracedError is a failure of a model that has a trace, which is for logs alone.
type TracedError interface {
	error
	// Trace returns where it comes from, a line that is the same for all from there, and
	// what led there.
	Trace() (place, trace string)
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
