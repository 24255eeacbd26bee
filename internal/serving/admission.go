package serving

import (
	"sync/atomic"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/slab"
)

// Kind is what a caller opens.
type Kind uint8

// The kinds that have limits.
const (
	Sessions Kind = iota
	Transfers
	Calls
	kinds
)

// String names the kind in a refusal.
func (k Kind) String() string { return [...]string{"open sessions", "open transfers", "calls"}[k] }

// Caller is where requests come from, such as a connection: it knows what it has
// open. While a limit of the server is reached, a caller that has fewer than ownOpen
// of a kind may open one more all the same: a caller that floods the server starves
// only itself. The zero value is ready.
type Caller struct {
	open   [kinds]atomic.Int64
	holder atomic.Pointer[slab.Principal]
}

// principal holds the memory of the caller's calls outside sessions.
func (c *Caller) principal() *slab.Principal {
	c.holder.CompareAndSwap(nil, slab.NewPrincipal("calls of a connection"))
	return c.holder.Load()
}

// Calls returns how many calls are open.
func (c *Caller) Calls() int64 { return c.open[Calls].Load() }

// gate bounds what is open of one kind.
type gate struct {
	most          int64
	open, refused atomic.Int64
}

// Enter admits one more of a kind, or says why not (*RefusedError); Leave follows.
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

// Leave ends what Enter admitted.
func (c *Core) Leave(k Kind, from *Caller) {
	c.gates[k].open.Add(-1)
	from.open[k].Add(-1)
}

// Begin admits a request that is answered before Drain is over, unless the server
// drains already (*RefusedError); End follows.
func (c *Core) Begin() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.draining {
		return errDraining
	}
	c.unanswered.Add(1)
	return nil
}

// End ends what Begin admitted: it has been answered.
func (c *Core) End() { c.unanswered.Add(-1) }
