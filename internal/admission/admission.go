// Package admission limits what callers have open, and how often what they cause is logged.
//
// It does not know what they open, or how they are told that they may not. Its types are
// safe for concurrent use.
package admission

import (
	"sync/atomic"

	"github.com/tensorferry/tensorferry/slab"
)

// Kind is a kind of work that a caller opens.
type Kind uint8

// The kinds of work. Each has a limit.
const (
	Sessions Kind = iota
	Transfers
	Calls
	Sequences
	Kinds // how many there are
)

// String returns the name of the kind for error texts.
func (k Kind) String() string {
	return [...]string{"open sessions", "open transfers", "calls", "sequences"}[k]
}

const (
	// ownOpen is how many sessions, transfers and calls a caller may have when few places are
	// left: one to use, and others that are still ending when it opens that.
	ownOpen = 4
	// kept is the share of the places that is only for callers with fewer than ownOpen: a
	// quarter, but one of two or three. A caller that floods the server starves only itself.
	kept = 4
)

// Caller is a source of requests, such as a connection, and counts what it has open. The zero
// value is ready to use.
type Caller struct {
	open   [Kinds]atomic.Int64
	holder slab.Principal
}

// Principal returns the principal that holds the memory of the caller's calls outside
// sessions.
func (c *Caller) Principal() *slab.Principal { return &c.holder }

// Calls returns the number of open calls.
func (c *Caller) Calls() int64 { return c.open[Calls].Load() }

// Gates limits what all callers have open.
type Gates struct {
	Limits                [Kinds]int // set before the first use
	open, ending, refused [Kinds]atomic.Int64
}

// Enter admits one more of a kind, which Leave must follow, or reports false.
func (g *Gates) Enter(k Kind, from *Caller) bool {
	mine := from.open[k].Add(1)
	limit := int64(g.Limits[k])
	if mine > ownOpen {
		limit -= max(limit/kept, min(limit-1, 1))
	}
	if g.open[k].Add(1) > limit || g.ending[k].Load() > max(int64(g.Limits[k]), ownOpen) {
		g.Leave(k, from)
		g.Refuse(k)
		return false
	}
	return true
}

// Ending says that one has ended for its caller, who may open another, but still does
// something on the server. As many as the limit may; Ended must follow, and no Leave.
func (g *Gates) Ending(k Kind, from *Caller) {
	g.ending[k].Add(1)
	g.Leave(k, from)
}

// Ended follows Ending.
func (g *Gates) Ended(k Kind) { g.ending[k].Add(-1) }

// Leave undoes Enter.
func (g *Gates) Leave(k Kind, from *Caller) {
	g.open[k].Add(-1)
	from.open[k].Add(-1)
}

// Refuse counts a refusal, as Enter does.
func (g *Gates) Refuse(k Kind) { g.refused[k].Add(1) }

// Count returns how many of a kind are open, and how many were refused.
func (g *Gates) Count(k Kind) (open, refused int64) { return g.open[k].Load(), g.refused[k].Load() }
