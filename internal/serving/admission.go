package serving

import (
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/admission"
)

// Enter admits one more of a kind, or returns a *RefusedError. Leave must follow.
func (c *Core) Enter(k admission.Kind, from *admission.Caller) error {
	if !c.gates.Enter(k, from) {
		return TryLater(frame.ResourceExhausted, "%v: the limit of the server is %d; try again later", k, c.gates.Limits[k])
	}
	return nil
}

// Leave undoes Enter.
func (c *Core) Leave(k admission.Kind, from *admission.Caller) { c.gates.Leave(k, from) }

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
