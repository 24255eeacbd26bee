package stream

import (
	"slices"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/recent"
	"github.com/tensorferry/tensorferry/tensor"
)

// EventKind says what an Event tells.
type EventKind uint8

// The events.
const (
	// EventOpened: the session's hellos have been exchanged.
	EventOpened EventKind = iota + 1
	// EventReady (server): a call has come and every input is announced.
	EventReady
	// EventTensor: an incoming tensor was announced. If Desc.OnAllowance, its
	// whole memory must be lent while handling this event, or the tensor failed.
	EventTensor
	// EventChunk: bytes [Off, Off+N) of an incoming tensor are in place.
	EventChunk
	// EventWhole: every byte of an incoming tensor is in place.
	EventWhole
	// EventStop: the call has failed or was cancelled, for the reason in Code and
	// Text. Whoever works for it should stop.
	EventStop
	// EventClosed: the call is over, and all memory lent for it has been returned.
	// A call's last event, once, also for a call that never was ready. Done is set
	// on the client.
	EventClosed
	// EventDrain: the peer opens and takes nothing new.
	EventDrain
)

// Event is something that happened while a machine handled its input. Pointers
// are lent until the next call of the machine.
type Event struct {
	Kind   EventKind
	Call   tensor.ID
	Tensor tensor.ID
	Desc   *frame.Desc
	Part   *frame.Call // EventReady
	Done   *frame.Done // EventClosed on the client
	N      int64
	Off    int64
	Code   frame.Code
	Text   string

	done   func(filled bool) // of memory to be returned: no event for the holder
	filled bool
}

// shared is what calls, sender and receiver have in common.
type shared struct {
	cfg      Config      // Limits with defaults; Session and Check as agreed
	peer     frame.Hello // as far as it binds this side
	draining bool        // this side opens nothing new
	drained  bool        // nor does the peer
	peerDone bool        // the peer sends nothing more
	shut     bool        // the session is over

	events     []Event
	taken      int             // events handed out
	tombstones recent.IDs      // of calls and tensors that ended: frames that crossed the end are ignored
	failures   []frame.Failure // to be sent
	waiting    int             // bytes of text in failures and in dones to be sent
	most       int             // entries that a map of calls or tensors has had since it was made
	stats      Stats

	lastUse Instant // when a call was last seen open, or the session began
	ticked  Instant // when the slow timers were last looked at
}

func (s *shared) tell(e Event) { s.events = append(s.events, e) }

// sayFailed tells the peer that a tensor was given up.
func (s *shared) sayFailed(id tensor.ID, code frame.Code, text string) {
	s.failures = append(s.failures, frame.Failure{Tensor: id, Code: code, Message: text})
	s.waiting += len(text)
}

// Event returns the next thing that happened, and runs the done functions of
// memory that was returned before it. Events come in order; handling one may cause
// more.
func (m *Machine) Event() (Event, bool) {
	for m.taken < len(m.events) {
		e := m.events[m.taken]
		m.taken++
		if e.done == nil {
			return e, true
		}
		e.done(e.filled)
	}
	clear(m.events)
	if m.events = m.events[:0]; cap(m.events) > retainedEvents {
		m.events = nil
	}
	m.taken = 0
	return Event{}, false
}

// pop removes and returns the i-th of a queue, and frees a long queue that is empty.
func pop[T any](q *[]T, i int) T {
	v := (*q)[i]
	if *q = slices.Delete(*q, i, i+1); len(*q) == 0 && cap(*q) > retainedQueue {
		*q = nil
	}
	return v
}
