// Package failures remembers why calls failed, the last of them, and logs it: the first of each
// kind always, later ones as a sample, so that a peer that causes many does not fill the disk. It also
// says what callers are told.
//
// It refuses to decide who may know: server does. A Log is safe for concurrent use.
package failures

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/admission"
	"github.com/tensorferry/tensorferry/tensor"
)

// Failure is a call that failed.
type Failure struct {
	Number           uint64 // of failures, from 1
	At               time.Time
	Call             tensor.ID
	Principal, Model string
	Code             frame.Code
	Cause            string // a line, at most causeBytes
}

// Log has the last failures.
type Log struct {
	log *slog.Logger

	mu    sync.Mutex                        // guards all below
	kinds map[string]*admission.LogSamplers // by model; those of "" are all others'
	last  []Failure                         // a ring, in which number n is at n%kept
	next  uint64
}

// New returns a Log that logs to log.
func New(log *slog.Logger) *Log {
	return &Log{log: log, kinds: make(map[string]*admission.LogSamplers), next: 1}
}

// Add adds a failure, whose cause and number it sets.
func (l *Log) Add(f Failure, err error) {
	place, trace := traceOf(err)
	f.Cause = err.Error()
	if trace != "" {
		f.Cause += " (" + place + ")"
	}
	f.Cause = frame.Clip(strings.ToValidUTF8(oneLine.Replace(f.Cause), "�"), causeBytes)
	attrs := []slog.Attr{
		slog.String("call", f.Call.String()), slog.String("principal", f.Principal), slog.String("model", f.Model), slog.String("error", err.Error()),
	}
	if trace != "" {
		attrs = append(attrs, slog.String("trace", trace[max(0, len(trace)-traceBytes):]))
	}
	l.keep(&f, place).Log(l.log, slog.LevelError, "call failed", "failures", attrs...)
}

var oneLine = strings.NewReplacer("\r\n", " ", "\n", " ", "\r", " ")

// keep adds a failure to the ring, and returns the sampler of its kind.
func (l *Log) keep(f *Failure, place string) *admission.LogSampler {
	l.mu.Lock()
	defer l.mu.Unlock()
	f.Number = l.next
	l.next++
	if len(l.last) < kept {
		l.last = append(l.last, *f)
	} else {
		l.last[(f.Number-1)%kept] = *f
	}
	model := f.Model
	if l.kinds[model] == nil && len(l.kinds) >= kept {
		model = ""
	}
	if l.kinds[model] == nil {
		l.kinds[model] = new(admission.LogSamplers)
	}
	return l.kinds[model].Of(fmt.Sprint(f.Code, " ", place)) // what a peer says is no part of it
}

// traceOf returns where an error comes from, and its trace, if it has one.
func traceOf(err error) (place, trace string) {
	if t, ok := errors.AsType[engine.TracedError](err); ok {
		place, trace = t.Trace()
		return frame.Clip(cmp.Or(place, "unknown place"), placeBytes), trace
	}
	var types []string
	for ; err != nil; err = errors.Unwrap(err) {
		types = append(types, fmt.Sprintf("%T", err))
	}
	return strings.Join(types, " "), ""
}

// Before returns up to most failures with a number below before, the newest first; 0 is all.
// keep reports whether one counts.
func (l *Log) Before(before uint64, most int, keep func(*Failure) bool) (found []Failure) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if before == 0 || before > l.next {
		before = l.next
	}
	for n := before - 1; n > 0 && n+kept >= l.next && len(found) < most; n-- {
		if f := &l.last[(n-1)%kept]; keep(f) {
			found = append(found, *f)
		}
	}
	return found
}
