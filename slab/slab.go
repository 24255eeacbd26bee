// Package slab owns host memory: blocks with an owner, counted references and
// a place to go when the last reference is released, and budgets that bound how
// much of it is promised at a time.
//
// It refuses to hand out zeroed memory (a slab is reused as it was left) and to
// forgive a release too many: that panics. Pools and budgets are safe for
// concurrent use; a slab's bytes are as safe as its holders make them.
package slab

import (
	"fmt"
	"math"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/tensorferry/tensorferry/internal/invariants"
)

// Slab is a block of host memory with counted references. It starts with one.
type Slab struct {
	pool *Pool
	mem  []byte // the whole block, a size class long
	n    int    // the part the owner asked for
	refs atomic.Int32

	mapped bool            // mem lies outside the Go heap
	lost   runtime.Cleanup // of a mapped slab: unmaps mem when s is unreachable
}

// Bytes lends the slab's memory: valid while the caller holds a reference.
func (s *Slab) Bytes() []byte { return s.mem[:s.n:s.n] }

// Retain adds a reference, which shares the memory until its own Release.
func (s *Slab) Retain() {
	if s.refs.Add(1) <= 1 {
		panic("slab: retain of a released slab")
	}
}

// Release drops a reference; the last one gives the memory back to its pool.
func (s *Slab) Release() {
	switch n := s.refs.Add(-1); {
	case n < 0:
		panic("slab: released more often than retained")
	case n == 0:
		invariants.Poison(s.mem)
		s.pool.put(s)
	}
}

// Pool keeps released memory for the next taker, because the first touch of
// fresh pages costs more than the copy into them. It never refuses: how much
// memory may be taken is a Budget's business, asked before. It is safe for
// concurrent use.
type Pool struct {
	limit int64 // of bytes in free, and where another slab is made, of those handed out with them

	mu     sync.Mutex      // guards all below
	free   map[int][]*Slab // by size class
	cached int64           // bytes in free
	live   int64           // bytes handed out
	slabs  int64           // slabs handed out
}

// NewPool returns a pool that keeps at most limit bytes of released memory, and
// gives it back to the system rather than hold more than limit bytes together
// with what is handed out.
func NewPool(limit int64) *Pool {
	return &Pool{free: make(map[int][]*Slab), limit: limit}
}

// Get hands over a slab of n bytes with one reference. Its content is whatever
// was there before: write it before anyone reads it. Large slabs lie outside
// the Go heap where the platform allows; a slab whose holder was lost (a
// connection that died with it in its queue) is returned to the system when
// the garbage collector finds it unreachable, never reused, and stays counted.
func (p *Pool) Get(n int) *Slab {
	if n < 0 {
		panic(fmt.Sprintf("slab: a slab of %d bytes", n))
	}
	class := sizeClass(n)
	p.mu.Lock()
	p.live += int64(class)
	p.slabs++
	if len(p.free[class]) > 0 {
		s := p.take(class)
		p.mu.Unlock()
		s.n = n
		s.refs.Store(1)
		return s
	}
	dropped := p.shrink(p.limit-p.live, class)
	p.mu.Unlock()
	drop(dropped)
	s := &Slab{pool: p, n: n}
	s.refs.Store(1)
	s.mem, s.mapped = allocate(class)
	if s.mapped {
		s.lost = runtime.AddCleanup(s, unmap, s.mem)
	}
	return s
}

// take removes a slab of a class that has one from the cache.
func (p *Pool) take(class int) *Slab {
	list := p.free[class]
	s := list[len(list)-1]
	list[len(list)-1] = nil
	p.free[class] = list[:len(list)-1]
	p.cached -= int64(class)
	return s
}

// put caches s, or gives memory back to the system when the cache is full:
// that of other sizes first, because what was released last is what the next
// taker asks for.
func (p *Pool) put(s *Slab) {
	class := len(s.mem)
	var dropped []*Slab
	p.mu.Lock()
	p.live -= int64(class)
	p.slabs--
	if int64(class) > p.limit {
		dropped = append(dropped, s)
	} else {
		dropped = p.shrink(p.limit-int64(class), class)
		p.free[class] = append(p.free[class], s)
		p.cached += int64(class)
	}
	p.mu.Unlock()
	drop(dropped)
}

// shrink takes slabs out of the cache until it holds at most the bytes named, or
// nothing; those of class go last. What it returns is for drop, without the lock.
func (p *Pool) shrink(most int64, class int) (dropped []*Slab) {
	for p.cached > max(most, 0) {
		dropped = append(dropped, p.take(p.victim(class)))
	}
	return dropped
}

// victim returns a size class to take from: not class itself while there is
// another.
func (p *Pool) victim(class int) int {
	for other, list := range p.free {
		if other != class && len(list) > 0 {
			return other
		}
	}
	return class
}

// drop gives the memory of slabs without references back at once. The garbage
// collector would too, but it does not see memory outside its heap and may not
// run for minutes.
func drop(slabs []*Slab) {
	for _, s := range slabs {
		if s.mapped {
			s.lost.Stop()
			unmap(s.mem)
		}
		s.mem = nil // a late reader meets an empty slab, not another's memory
		runtime.KeepAlive(s)
	}
}

// Live returns how many slabs, and how many bytes in them, are handed out.
func (p *Pool) Live() (slabs, bytes int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.slabs, p.live
}

// Kept returns how many bytes of released memory the pool keeps for the next taker.
func (p *Pool) Kept() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cached
}

// SizeOf returns the bytes that a slab of n bytes takes from a pool: what to ask
// a Budget for. A size beyond 63 bits becomes the largest there is.
func SizeOf(n int64) int64 {
	if n > math.MaxInt64-hugePage {
		return math.MaxInt64
	}
	return sizeClass(n)
}

// sizeClass rounds n up so that slabs are found again: to 4 KiB pages while
// small, to 64 KiB up to 2 MiB, to whole 2 MiB huge pages above.
func sizeClass[T int | int64](n T) T {
	switch {
	case n <= 64*kib:
		return max(roundUp(n, 4*kib), 4*kib)
	case n <= hugePage:
		return roundUp(n, 64*kib)
	default:
		return roundUp(n, hugePage)
	}
}

func roundUp[T int | int64](n, unit T) T { return (n + unit - 1) / unit * unit }
