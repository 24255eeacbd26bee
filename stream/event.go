package stream

import (
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/flow"
	"github.com/tensorferry/tensorferry/internal/recent"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/tensor"
)

// EventKind is the kind of an Event.
type EventKind uint8

// The kinds of events.
const (
	// EventOpened: the session's hellos have been exchanged.
	EventOpened EventKind = iota + 1
	// EventReady (server): a call has arrived and every input is announced.
	EventReady
	// EventTensor: an incoming tensor was announced. If Desc.OnAllowance is set, its whole
	// memory must be lent while this event is handled; otherwise the tensor fails.
	EventTensor
	// EventChunk: bytes [Off, Off+N) of an incoming tensor are in place.
	EventChunk
	// EventWhole: every byte of an incoming tensor is in place.
	EventWhole
	// EventStop: the call has failed or was cancelled; Code and Text have the reason. Work
	// on it should stop.
	EventStop
	// EventClosed: the call is over, and all memory lent for it has been returned. It is
	// the last event of every call, once, even if the call was never ready. Done is set on
	// the client.
	EventClosed
	// EventEnd (server): every tensor of a put is announced.
	EventEnd
	// EventFailed: a tensor of a put (server) or of a get (client) broke a rule, or was given
	// up by the peer; Code and Text have the reason. Its memory returns before EventClosed.
	// The server's holder then calls Summarize.
	EventFailed
	// EventSummary (client): Summary has the outcome of a tensor of a put or a get. If the
	// code is OK, EventWhole may still follow.
	EventSummary
	// EventSummed (server): the Summary of a tensor is on its way.
	EventSummed
)

// Event is something that happened while a machine handled its input. Pointers are lent
// until the next method call on the machine.
type Event struct {
	Kind   EventKind
	Call   tensor.ID
	Tensor tensor.ID
	Desc   *frame.Desc
	Part   *frame.Call // EventReady and EventClosed
	Done   *frame.Done // EventClosed on the client

	Summary *frame.Summary
	N       int64
	Off     int64
	Code    frame.Code
	Text    string
	Reason  reason.Reason

	done   func(filled bool) // set if memory is to be returned; such an event is not handed out
	filled bool
}

// Why returns why EventStop, EventClosed or EventFailed happened.
func (e *Event) Why() *frame.Error { return &frame.Error{Code: e.Code, Text: e.Text, Reason: e.Reason} }

// shared is the state common to calls, sender and receiver.
type shared struct {
	cfg      Config      // Limits with defaults applied; Session and Check as agreed
	peer     frame.Hello // the parts that bind this side
	draining bool        // this side opens nothing new
	drained  bool        // the peer opens nothing new
	peerDone bool        // the peer sends nothing more
	shut     bool        // the session is over

	events     []Event
	taken      int             // events handed out
	tombstones recent.IDs      // IDs of ended calls and tensors, whose late frames are ignored
	failures   []frame.Failure // to be sent
	waiting    int             // bytes of text in failures and dones to be sent
	retained   int             // server: bytes that the open calls retain
	inFlight   int             // tensors that the peer counts as open; client: weight of the calls
	most       int             // maximum number of entries of a map of calls or tensors since it was made
	stats      Stats
	road       flow.Road

	lastUse Instant // when a call was last open, or the session began
	ticked  Instant // when the slow timers were last checked
}

// transfer is what an incoming and an outgoing tensor have in common, except their flow.
type transfer struct {
	call *call
	last Instant // of the last progress
}

// touch records progress.
func (t *transfer) touch(now Instant) { t.last, t.call.last = now, now }

func (s *shared) tell(e Event) { s.events = append(s.events, e) }

// sayFailed tells the peer that a tensor was given up.
func (s *shared) sayFailed(id tensor.ID, why *frame.Error) {
	s.failures = append(s.failures, frame.Failure{Tensor: id, Code: why.Code, Message: why.Text, Reason: why.Reason})
	s.waiting += len(why.Text)
}

// Event returns the next event, and first runs the done functions of memory that was
// returned before it. Events come in order; handling one may cause others.
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
	if m.events = m.events[:0]; cap(m.events) > frame.KeptParts {
		m.events = nil
	}
	m.taken = 0
	return Event{}, false
}
