// Package lifecycle has the states of a call, from its opening to its end, and the tables
// of what moves it on either side, which docs/wire.md draws.
//
// It refuses to know why a call moves: stream, its only user, does. It holds no bytes.
package lifecycle

import (
	"fmt"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/invariants"
)

// State is where a call stands on one side. A call only ever moves down the list.
type State uint8

// The states, in the order in which a call passes them.
const (
	Opening   State = iota // client: it is not sent; server: not every input is announced
	Running                // the server works for it
	Finishing              // it ended well; client: results are not whole; server: not all is sent
	Answering              // server: it ended well, and done is to be sent
	DoneSent               // server: results are not acknowledged
	Failed                 // server: it ended badly, and done is to be sent
	Over                   // nothing is taken or sent for it; claims may be open
	Closed                 // EventClosed is among the events
)

// String returns the state as docs/wire.md has it.
func (s State) String() string {
	return [...]string{"Opening", "Running", "Finishing", "Answering", "DoneSent", "Failed", "Over", "Closed"}[s]
}

// Cause is what makes a call move.
type Cause uint8

// The causes.
const (
	Began Cause = iota
	Completed
	Answered
	Acknowledged
	Released
	EndedWell // from here on: ends, which may come late
	EndedBadly
	GivenUp
	SessionOver
)

// EndOf is the cause that a done with code is.
func EndOf(code frame.Code) Cause {
	if code == frame.OK {
		return EndedWell
	}
	return EndedBadly
}

// transition is one row of the table of a side.
type transition struct {
	from []State
	on   Cause
	to   State
	when string // in the words of docs/wire.md
}

// The tables of both sides, which docs/wire.md draws. The first end that is decided
// stands: one that comes in a state without a row for it has no effect. Any other
// cause comes only in a state that has a row for it.
var (
	clientTable = []transition{
		{[]State{Opening}, Began, Running, "the call is sent"},
		{[]State{Running}, EndedWell, Finishing, "done OK comes"},
		{[]State{Finishing}, Completed, Over, "every result is whole"},
		{[]State{Running}, EndedBadly, Over, "done with another code comes"},
		{[]State{Opening, Running, Finishing}, GivenUp, Over, "it is cancelled, or a result fails"},
		{[]State{Opening, Running, Finishing}, SessionOver, Over, "the session ends"},
		{[]State{Over}, Released, Closed, "nothing is being written to its place"},
	}
	serverTable = []transition{
		{[]State{Opening}, Began, Running, "every input is announced"},
		{[]State{Running}, EndedWell, Finishing, "the model has made every result"},
		{[]State{Finishing}, Completed, Answering, "every chunk is sent"},
		{[]State{Answering}, Answered, DoneSent, "done OK is sent"},
		{[]State{DoneSent}, Acknowledged, Over, "every result is acknowledged"},
		{[]State{Opening, Running, Finishing, Answering}, EndedBadly, Failed, "the model or a limit fails it"},
		{[]State{Opening, Running, Finishing, Answering}, GivenUp, Failed, "it is cancelled, a tensor fails, or a time limit passes"},
		{[]State{DoneSent}, GivenUp, Over, "it is cancelled, a tensor fails, or a time limit passes"},
		{[]State{Failed}, Answered, Over, "done with its code is sent"},
		{[]State{Opening, Running, Finishing, Answering, DoneSent, Failed}, SessionOver, Over, "the session ends"},
		{[]State{Over}, Released, Closed, "nothing is being written to its place"},
	}
)

// Moves is a table by state and cause; Opening, where nothing leads, is no move.
type Moves [Closed + 1][SessionOver + 1]State

// Client is the moves of the client's side.
var Client = movesOf(clientTable)

// Server is the moves of the server's side.
var Server = movesOf(serverTable)

func movesOf(table []transition) *Moves {
	m := new(Moves)
	for _, t := range table {
		for _, s := range t.from {
			m[s][t.on] = t.to
		}
	}
	return m
}

// Next returns where a cause leads, and whether it leads anywhere.
func (m *Moves) Next(s State, on Cause) (State, bool) {
	to := m[s][on]
	if to == Opening && on < EndedWell {
		invariants.Assert(false, fmt.Sprintf("lifecycle: cause %d in state %v", on, s))
	}
	return to, to != Opening
}
