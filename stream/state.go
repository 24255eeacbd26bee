package stream

import (
	"fmt"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/invariants"
)

// state is where a call stands on one side. A call only ever moves down the list.
type state uint8

const (
	opening   state = iota // client: it is not sent; server: not every input is announced
	running                // the server works for it
	finishing              // it ended well; client: results are not whole; server: not all is sent
	answering              // server: it ended well, and done is to be sent
	doneSent               // server: results are not acknowledged
	failed                 // server: it ended badly, and done is to be sent
	over                   // nothing is taken or sent for it; claims may be open
	closed                 // EventClosed is among the events
)

func (s state) String() string {
	return [...]string{"Opening", "Running", "Finishing", "Answering", "DoneSent", "Failed", "Over", "Closed"}[s]
}

// cause is what makes a call move.
type cause uint8

const (
	began cause = iota
	completed
	answered
	acknowledged
	released
	endedWell // from here on: ends, which may come late
	endedBadly
	givenUp
	sessionOver
)

// endOf is the cause that a done with code is.
func endOf(code frame.Code) cause {
	if code == frame.OK {
		return endedWell
	}
	return endedBadly
}

// transition is one row of the table of a side.
type transition struct {
	from []state
	on   cause
	to   state
	when string // in the words of docs/wire.md
}

func from(s ...state) []state { return s }

// The tables of both sides, which docs/wire.md draws. The first end that is decided
// stands: one that comes in a state without a row for it has no effect. Any other
// cause comes only in a state that has a row for it.
var (
	clientTable = []transition{
		{from(opening), began, running, "the call is sent"},
		{from(running), endedWell, finishing, "done OK comes"},
		{from(finishing), completed, over, "every result is whole"},
		{from(running), endedBadly, over, "done with another code comes"},
		{from(opening, running, finishing), givenUp, over, "it is cancelled, or a result fails"},
		{from(opening, running, finishing), sessionOver, over, "the session ends"},
		{from(over), released, closed, "nothing is being written to its place"},
	}
	serverTable = []transition{
		{from(opening), began, running, "every input is announced"},
		{from(running), endedWell, finishing, "the model has made every result"},
		{from(finishing), completed, answering, "every chunk is sent"},
		{from(answering), answered, doneSent, "done OK is sent"},
		{from(doneSent), acknowledged, over, "every result is acknowledged"},
		{from(opening, running, finishing, answering), endedBadly, failed, "the model or a limit fails it"},
		{from(opening, running, finishing, answering), givenUp, failed, "it is cancelled, a tensor fails, or a time limit passes"},
		{from(doneSent), givenUp, over, "it is cancelled, a tensor fails, or a time limit passes"},
		{from(failed), answered, over, "done with its code is sent"},
		{from(opening, running, finishing, answering, doneSent, failed), sessionOver, over, "the session ends"},
		{from(over), released, closed, "nothing is being written to its place"},
	}
)

// moves is a table by state and cause; opening, where nothing leads, is no move.
type moves [closed + 1][sessionOver + 1]state

var clientMoves, serverMoves = movesOf(clientTable), movesOf(serverTable)

func movesOf(table []transition) *moves {
	m := new(moves)
	for _, t := range table {
		for _, s := range t.from {
			m[s][t.on] = t.to
		}
	}
	return m
}

// next returns where a cause leads, and whether it leads anywhere.
func (m *moves) next(s state, on cause) (state, bool) {
	to := m[s][on]
	if to == opening && on < endedWell {
		invariants.Assert(false, fmt.Sprintf("stream: cause %d in state %v", on, s))
	}
	return to, to != opening
}
