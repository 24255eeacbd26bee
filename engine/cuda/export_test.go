package cuda

import (
	"time"

	"github.com/tensorferry/tensorferry/slab"
)

// Pool returns the pool that every block of the host's models comes from.
func (h *Host) Pool() *slab.Pool { return h.pool }

// Budget returns the budget that every run of the host's models is admitted by.
func (h *Host) Budget() *slab.Budget { return h.budget }

// Closing says how long hosts and runs wait to be closed.
func (c *Config) Closing(wait time.Duration) { c.closing = wait }
