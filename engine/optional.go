package engine

import (
	"context"

	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// HealthWatcher is a Model that cannot run at every time.
type HealthWatcher interface {
	// WatchHealth tells how the model is, nil or why it cannot run, and then each change, in
	// order, until stop is called. told is quick, and calls neither the model nor its engine.
	WatchHealth(told func(health error)) (stop func())
}

// Gauger is a Model with something to measure.
type Gauger interface {
	// Gauges returns what it measures now, always the same gauges in the same order.
	// Safe for concurrent use; it does not wait for a run.
	Gauges() []Gauge
}

// Gauge is one measured value. Its name is lower-case words with a unit, joined by
// underscores, as Prometheus has them: "device_memory_bytes".
type Gauge struct {
	Name    string
	Meaning string // a phrase
	Value   float64
}

// Immediate is a Model whose small calls take less than it would to have another goroutine compute them.
type Immediate interface {
	// AtOnce computes c in place: data are the bytes of its only input, and become those of the only
	// output, which is as its input. It reports false, and has done nothing, if c has to go
	// through Open: its device is busy, c is too large, or wrong. It waits for nothing, and calls
	// no code of users. data is borrowed.
	AtOnce(c Call, data []byte) bool
}

// Sequencer is a Model that keeps something between the calls of a sequence, such as the keys and
// values of attention. Of other models the calls of a sequence are independent of each other.
type Sequencer interface {
	// Begin begins a sequence and waits for the memory of its state. Errors are those of Open;
	// a nil State means that the calls are independent. ctx ends with Begin.
	Begin(ctx context.Context, q Sequence) (State, error)
}

// Sequence is a series of calls of a model, one after the other, as its Begin sees them.
type Sequence struct {
	ID        tensor.ID
	Principal *slab.Principal   // holds the memory that the state takes
	Params    map[string]string // of each of its calls; read-only
	MaxRows   int64             // of all of its calls together, 1 or more
}

// State is what a model keeps for a sequence. One call at a time has it, from Open until its
// last result; Close comes after the last call. A call that fails leaves it undefined: then
// it is only closed.
type State interface {
	// Rows checks the inputs of a call as Open does, and returns how many rows they add.
	Rows(c Call) (int64, error)
	// Bytes returns how much memory it takes. Safe for concurrent use.
	Bytes() int64
	// Close gives the state up. It does not wait for the model's own code.
	Close()
}

// As finds what m offers beside Model, T, under its wrappers. One that has no method
// Unwrap() Model hides what it wraps.
func As[T any](m Model) (T, bool) {
	for {
		if t, ok := any(m).(T); ok {
			return t, true
		}
		w, ok := m.(interface{ Unwrap() Model })
		if !ok {
			var none T
			return none, false
		}
		m = w.Unwrap()
	}
}
