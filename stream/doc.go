// Package stream is the session state machine: it decides what may be sent next, given what
// was received. It is pure: no goroutines, locks, clocks or sockets; time comes in as an
// argument and memory as borrowed views. internal/session runs a Machine over a connection
// of frames, the same way on both sides.
//
// A Machine consists of calls, which change state as the tables of internal/lifecycle say,
// a sender of this side's tensors and a receiver of the peer's. terms has what a side brings
// into the session, and what it admits; internal/flow has whose chunk goes next, and which
// credits and acknowledgements are due. The Machine itself parses and fills frames, and
// watches the time.
//
// A frame that breaks the protocol ends the session; a tensor that breaks a rule fails, and
// the session continues. A Machine belongs to one goroutine at a time. It owns no bytes:
// memory lent for incoming data, or shared for outgoing data, is returned exactly once, by
// a function that came with it.
package stream
