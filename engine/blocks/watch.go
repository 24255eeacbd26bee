package blocks

import "time"

// Watch tells a device that something is not done in time. A device guards it with a lock of its own.
type Watch struct {
	Due   time.Time // when something is; zero while nothing is
	timer *time.Timer
}

// NewWatch returns a watch on which nothing is due. It calls check, on a goroutine of its own, when
// something may be late.
func NewWatch(check func()) *Watch {
	w := &Watch{timer: time.AfterFunc(time.Hour, check)}
	w.timer.Stop()
	return w
}

// Set says when something is due, instead of what was.
func (w *Watch) Set(due time.Time) {
	w.Due = due
	w.timer.Reset(time.Until(due))
}

// Clear says that nothing is due.
func (w *Watch) Clear() {
	w.Due = time.Time{}
	w.timer.Stop()
}

// Late reports whether what is due should have been done by now.
func (w *Watch) Late() bool { return !w.Due.IsZero() && !time.Now().Before(w.Due) }
