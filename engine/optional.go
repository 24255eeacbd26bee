package engine

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
