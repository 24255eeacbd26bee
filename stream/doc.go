// Package stream is the session state machine: what may be sent next, given
// what was received. It is pure: no goroutine, no lock, no clock, no socket;
// time comes in as an argument and memory as borrowed views. internal/session
// runs one Machine over a connection of frames, the same on both sides.
//
// A Machine is made of calls, which move from state to state as the tables of
// internal/lifecycle say, a sender of this side's tensors and a receiver of the peer's. The
// Machine itself takes frames apart, fills them, and watches the time.
//
// It refuses frames that break the protocol (the session ends) and fails
// tensors that break a rule (the session lives on). A Machine belongs to one
// goroutine at a time. It owns no bytes: memory that is lent for what comes, or
// shared for what goes, returns by a function that came with it, exactly once.
package stream
