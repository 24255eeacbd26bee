package serving

import (
	"context"
	"time"

	"github.com/tensorferry/tensorferry/slab"
)

// promise returns how much of an allowance of most bytes a new session of limits is granted,
// and what is promised for that: each tensor takes whole pages. All sessions may use theirs
// at the same time, so when little is left, each gets a part of that, or nothing and must
// wait for credit. What is promised is kept apart from the budget, and nobody waits for it.
// mu is held.
func (c *Core) promise(most uint32, tensors int) (granted uint32, promised int64) {
	pages := slab.PagesOf(1) * int64(tensors)
	left := (c.Budget.Limit()/allowancesShare - c.promised) / promiseShare
	granted = uint32(min(int64(most), max(left-pages, 0)))
	if granted == 0 {
		return 0, 0
	}
	promised = int64(granted) + pages
	c.promised += promised
	return granted, promised
}

// Patience calls cancel with why, unless it is stopped, when somebody has waited for memory
// for as long as anybody may.
func (c *Core) Patience(cancel context.CancelCauseFunc, why error) *time.Timer {
	return time.AfterFunc(c.MemoryWait, func() { cancel(why) })
}
