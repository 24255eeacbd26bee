package blocks

import "time"

// shed gives back memory that the run can do without: free slots beyond the fewest,
// and that of results that have waited long for their taker, which are copied out. It
// reports whether there was any.
func (r *run) shed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false
	}
	before := r.granted
	for len(r.free) > 0 && r.inSlots > r.plan.minIn {
		last := len(r.free) - 1
		drop(&r.free[last].slab)
		r.free = r.free[:last]
		r.inSlots--
		r.giveUp(r.plan.inBlock)
	}
	for w := r.results.Head(); w != nil && time.Since(w.since) >= spillAfter; w = w.next {
		r.spill(w)
	}
	return r.granted < before
}

// Widen implements engine.Widener.
func (r *run) Widen(bytes int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed || r.ctx.Err() != nil {
		return
	}
	most := func(block int64) int64 {
		if block == 0 {
			return 0
		}
		return min(bytes/block, maxSlots, r.plan.blocks)
	}
	r.grow(most(r.plan.inBlock), most(r.plan.outBlock))
	wake(r.lendable)
	r.launch()
}

// giveUp returns bytes to the budget; mu is held.
func (r *run) giveUp(bytes int64) {
	r.granted -= bytes
	r.engine.cfg.Budget.Release(r.holder, bytes)
}

// spill copies the results of a block out, if there is room, of which none has been
// given out. The memory that they had is not taken again; mu is held.
//
// The window shrinks with it, so whatever block of the window is not started still
// finds memory for its results: none is taken from those that are free.
func (r *run) spill(w *Work) {
	to := r.engine.cfg.Spill
	if to == nil || w.slab == nil || w.spilled || w.cursor > 0 || r.window <= r.plan.minOut || !to.Budget.TryAcquire(r.holder, r.plan.outBlock) {
		return
	}
	s, err := to.Pool.Get(int(r.plan.outBlock))
	if err != nil {
		to.Budget.Release(r.holder, r.plan.outBlock)
		return
	}
	copy(s.Bytes(), w.slab.Bytes()) // scratch memory too: it is hardly ever there
	carve(s.Bytes(), w.Out, r.plan.outRow, w.Rows)
	drop(&w.slab)
	w.slab, w.spilled = s, true
	r.window--
	r.giveUp(r.plan.outBlock)
}

// unspill frees results that were copied out; mu is held.
func (r *run) unspill(w *Work) {
	drop(&w.slab)
	w.spilled = false // it is not reused
	r.engine.cfg.Spill.Budget.Release(r.holder, r.plan.outBlock)
}
