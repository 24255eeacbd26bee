// Package blocks runs models block by block, for every engine: over a backing of
// memory that the engine chooses, and a Device that computes, at once or later.
//
// It refuses to know what is computed and where. Memory is the pool's, lent for
// input and shared for results until released; a device borrows both from Start to
// Done. Engines and models are safe for concurrent use.
package blocks

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/slab"
)

// Device computes blocks.
type Device interface {
	// Start has w computed and never blocks. Blocks of a run are started one after
	// the other, ascending; each ends with one w.Done, from any goroutine, in any
	// order, perhaps before Start returns. Where w.Context has ended, Start does
	// nothing but that: after a loss the memory may be another's already. A device
	// that can be lost looks at it under the lock of its queue.
	//
	// InputFree, Done and Release of a result may call Start on their goroutine: a
	// device holds no lock of its own while it calls them.
	Start(w *Work)
}

// Helper is a Device that borrows the goroutine of whoever waits for the result of
// a small call: that is quicker than to wake another.
type Helper interface {
	// Help computes w if the device would begin that next, and reports whether it did.
	Help(w *Work) bool
	// Compute computes a block of a quick model on this goroutine, unless that would keep
	// others waiting, and reports whether it did.
	Compute(program any, b RowBlock) bool
}

// Canceler is a Device that keeps blocks waiting. One that may keep them for seconds is
// a Canceler: a run that is closed gives its memory up after five, and its model does
// not serve until its blocks have ended, or it is replaced.
type Canceler interface {
	// Cancel ends (Done) the blocks with this Context that the device has not begun:
	// their run is closed, and waits for them.
	Cancel(run context.Context)
}

// Config is what an engine consists of.
type Config struct {
	Name   string // such as "cuda:0"; what Info.Device is where a model says none
	Device Device
	Pool   *slab.Pool   // every block's memory comes from it
	Budget *slab.Budget // every run is admitted by it
	// Spill, if it is set, is where results go that wait for their taker while others
	// wait for Budget: ordinary memory, where that of the pool is scarce.
	Spill *Spill
	// CloseWait is how long a run that is closed waits for its blocks and results. Zero means CloseWait.
	CloseWait time.Duration
}

// Spill is memory beside that of the pool.
type Spill struct {
	Pool   *slab.Pool
	Budget *slab.Budget
}

// State is how a device is.
type State uint8

// States of a device, from the best to the worst.
const (
	Alive State = iota
	Hung        // it does not answer, or is about to be lost
	Lost        // and nothing is on it
)

// Engine is where models of one device run.
type Engine struct {
	cfg Config

	mu       sync.Mutex // guards all below; taken after that of a run
	state    State
	health   error // why nothing can run now
	runs     map[*run]struct{}
	watchers map[*func(error)]struct{}
}

// New returns an engine. It starts nothing; what it consists of stays the caller's.
func New(c Config) *Engine {
	c.CloseWait = cmp.Or(c.CloseWait, CloseWait)
	e := &Engine{cfg: c, runs: make(map[*run]struct{}), watchers: make(map[*func(error)]struct{})}
	if c.Spill != nil {
		c.Budget.Reclaim(e.spare)
	}
	return e
}

// spare gives back what runs can do without, and reports whether there was any.
func (e *Engine) spare() (some bool) {
	e.mu.Lock()
	runs := slices.Collect(maps.Keys(e.runs))
	e.mu.Unlock()
	for _, r := range runs {
		some = r.shed() || some
	}
	return some
}

// Lost says that the device is gone, with all that is on it. Before, it has emptied its queue
// and waited for what touches memory of blocks that were started: those may be lent again
// when Lost returns. Every run ends with an error that wraps engine.ErrUnavailable and cause,
// which callers read; nothing is opened until Back, and what the device still says of those
// blocks is ignored. Results that were given out stay readable until they are released. It
// never blocks, and may be called from Start. Once lost, a second loss changes nothing.
//
// So that what it says is heard in order, a device holds the lock of its queue while it calls
// Lost, Hung and Back.
func (e *Engine) Lost(cause error) {
	for _, r := range e.end(Lost, cause) {
		r.lose()
	}
}

// Hung says that the device does not answer, or is about to be lost. It is Lost, but
// the blocks that were started stay the device's until it ends them, or is lost: a run
// that is closed before waits for them, and then abandons their memory.
func (e *Engine) Hung(cause error) { e.end(Hung, cause) }

// end ends every run, and returns them. The first cause stands.
func (e *Engine) end(state State, cause error) []*run {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.state == Alive {
		e.tell(fmt.Errorf("%w: device %s is lost: %w", engine.ErrUnavailable, e.cfg.Name, cause))
	}
	e.state = max(e.state, state)
	for r := range e.runs {
		r.fail(e.health)
	}
	return slices.Collect(maps.Keys(e.runs))
}

// Back says, some time after Lost or Hung has returned, that the device computes again. It
// reports whether it did not before.
func (e *Engine) Back() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.state == Alive {
		return false
	}
	e.state = Alive
	e.tell(nil)
	return true
}

// State returns how the device is, as it has said.
func (e *Engine) State() State {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.state
}

// tell notes the health of the models, and tells of it; mu is held.
func (e *Engine) tell(health error) {
	e.health = health
	for told := range e.watchers {
		(*told)(health)
	}
}

func (e *Engine) watch(told func(error)) (stop func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.watchers[&told] = struct{}{}
	told(e.health)
	return func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		delete(e.watchers, &told)
	}
}

// enter takes r in, unless the device is lost.
func (e *Engine) enter(r *run) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.health == nil {
		e.runs[r] = struct{}{}
	}
	return e.health
}

func (e *Engine) leave(r *run) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.runs, r)
}
