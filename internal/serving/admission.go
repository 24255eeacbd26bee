package serving

import (
	"sync/atomic"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/slab"
)

// Kind is a kind of work that a caller opens.
type Kind uint8

// The kinds of work. Each has a limit.
const (
	Sessions Kind = iota
	Transfers
	Calls
	kinds
)

// String returns the name of the kind for error texts.
func (k Kind) String() string { return [...]string{"open sessions", "open transfers", "calls"}[k] }

// Caller is a source of requests, such as a connection, and counts what it has open. When a
// limit of the server is reached, a caller with fewer than ownOpen of a kind may still open
// another: a caller that floods the server starves only itself. The zero value is ready to
// use.
type Caller struct {
	open   [kinds]atomic.Int64
	holder atomic.Pointer[slab.Principal]
}

// principal returns the principal that holds the memory of the caller's calls outside
// sessions.
func (c *Caller) principal() *slab.Principal {
	c.holder.CompareAndSwap(nil, slab.NewPrincipal("calls of a connection"))
	return c.holder.Load()
}

// Calls returns the number of open calls.
func (c *Caller) Calls() int64 { return c.open[Calls].Load() }

// gate limits how many of one kind are open.
type gate struct {
	most          int64
	open, refused atomic.Int64
}

// Enter admits one more of a kind, or returns a *RefusedError. Leave must follow.
func (c *Core) Enter(k Kind, from *Caller) error {
	g := &c.gates[k]
	mine := from.open[k].Add(1)
	if g.open.Add(1) > g.most && mine > ownOpen {
		c.Leave(k, from)
		g.refused.Add(1)
		return TryLater(frame.ResourceExhausted, "%v: the limit of the server is %d; try again later", k, g.most)
	}
	return nil
}

// Leave undoes Enter.
func (c *Core) Leave(k Kind, from *Caller) {
	c.gates[k].open.Add(-1)
	from.open[k].Add(-1)
}

// Begin admits a request that Drain must wait for. While the server drains, it returns a
// *RefusedError. End must follow.
func (c *Core) Begin() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.draining {
		return errDraining
	}
	c.unanswered.Add(1)
	return nil
}

// End undoes Begin, once the request has been answered.
func (c *Core) End() { c.unanswered.Add(-1) }
