package serving

import (
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/slab"
)

// promise returns how much of an allowance of most bytes a new session of limits is granted,
// and what is promised for that: each tensor takes whole pages. All sessions may use theirs
// at the same time, so when little is left, each gets a part of that, or nothing and must
// wait for credit. What is promised is kept apart from the budget, and nobody waits for it.
// mu is held.
func (c *Core) promise(most uint32, tensors int) (granted uint32, promised int64) {
	pages := slab.PagesOf(1) * int64(tensors)
	left := (c.limit()/allowancesShare - c.promised) / promiseShare
	granted = uint32(min(int64(most), max(left-pages, 0))) &^ (promiseUnit - 1)
	if granted == 0 {
		return 0, 0
	}
	promised = int64(granted) + pages
	c.promised += promised
	return granted, promised
}

// limit returns the bytes of the budget.
func (c *Core) limit() int64 {
	_, _, limit := c.Budget.Used()
	return limit
}

// small returns the principal for a call whose inputs have so many bytes: a small one has a part
// of the budget for which it need not wait behind large ones.
func (c *Core) small(p *slab.Principal, bytes int64) *slab.Principal {
	if bytes > min(frame.AllowanceCeiling, c.limit()/smallShare/smallCalls) {
		return p
	}
	return p.In(c.Smalls)
}
