// Package slab owns host memory, made by a backing: blocks with counted
// references that go back to a pool with the last one, and budgets that bound how
// much is promised to principals at a time.
//
// It refuses to hand out zeroed memory (a slab is reused as it was left) and to
// forgive a release too many: that panics. Pools and budgets are safe for
// concurrent use; a slab's bytes are as safe as its holders make them.
package slab

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/tensorferry/tensorferry/internal/invariants"
)

// ErrMemory is wrapped when a pool's backing has no memory to give.
var ErrMemory = errors.New("slab: no memory")

// Slab is a block of host memory with counted references. It starts with one.
type Slab struct {
	pool *Pool  // nil in the cache, which must not keep its pool alive
	mem  []byte // the whole block
	n    int    // the part the owner asked for
	refs atomic.Int32

	account *Account // that gets len(mem) bytes back; nil if none does
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
		a, size := s.account, int64(len(s.mem))
		s.account = nil
		s.pool.put(s)
		if a != nil {
			a.Release(size)
		}
	}
}

// Backing makes and frees the memory of a Pool. Safe for concurrent use.
type Backing interface {
	// Alloc hands over n bytes of any content; n is what SizeOf or PagesOf returns.
	Alloc(n int) ([]byte, error)
	// Free takes what Alloc returned, which is handed over: nobody uses it any more.
	Free(mem []byte)
}

// System is the memory of this process: the Go heap, and on Linux mappings
// outside it for 64 KiB or more.
var System Backing = system{}

type system struct{}

// Pool keeps released memory for the next taker, because the first touch of
// fresh pages costs more than the copy into them. How much memory may be taken is
// a Budget's business, asked before. It is safe for concurrent use.
//
// A slab that is forgotten, not released, stays counted and is never freed:
// somebody may still hold its bytes. When the pool itself is unreachable, what it
// keeps is freed.
type Pool struct {
	limit int64 // of bytes in cache, and where another slab is made, of those handed out with them

	mu    sync.Mutex // guards all below
	cache *cache
	live  int64 // bytes handed out
	slabs int64 // slabs handed out
}

// cache is memory without holders. It does not refer to its pool, whose cleanup frees it.
type cache struct {
	backing Backing
	free    map[int][]*Slab // by length
	bytes   int64           // in free
}

// NewPool returns a pool of memory that b makes. It keeps at most limit bytes of
// released memory, and frees it rather than hold more than limit bytes together
// with what is handed out.
func NewPool(limit int64, b Backing) *Pool {
	p := &Pool{limit: limit, cache: &cache{backing: b, free: make(map[int][]*Slab)}}
	runtime.AddCleanup(p, func(c *cache) { c.drop(c.shrink(0, 0)) }, p.cache)
	return p
}

// Get hands over a slab of n bytes with one reference. Its content is whatever
// was there before: write it before anyone reads it. Errors wrap ErrMemory.
func (p *Pool) Get(n int) (*Slab, error) { return p.get(n, int(SizeOf(int64(n)))) }

// GetPages is like Get, but the slab takes no more than PagesOf(n) bytes: for what is kept, and
// not soon taken again.
func (p *Pool) GetPages(n int) (*Slab, error) { return p.get(n, int(PagesOf(int64(n)))) }

func (p *Pool) get(n, class int) (*Slab, error) {
	if n < 0 {
		panic(fmt.Sprintf("slab: a slab of %d bytes", n))
	}
	p.mu.Lock()
	p.live += int64(class)
	p.slabs++
	if len(p.cache.free[class]) > 0 {
		s := p.cache.take(class)
		p.mu.Unlock()
		s.pool, s.n = p, n
		s.refs.Store(1)
		return s, nil
	}
	dropped := p.cache.shrink(p.limit-p.live, class)
	p.mu.Unlock()
	p.cache.drop(dropped)
	mem, err := p.cache.backing.Alloc(class)
	if err != nil { // perhaps because of what is kept in other sizes
		p.mu.Lock()
		dropped = p.cache.shrink(0, 0)
		p.mu.Unlock()
		p.cache.drop(dropped)
		mem, err = p.cache.backing.Alloc(class)
	}
	if err != nil {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.live -= int64(class)
		p.slabs--
		return nil, fmt.Errorf("%w for %d bytes: %w", ErrMemory, class, err)
	}
	s := &Slab{pool: p, mem: mem, n: n}
	s.refs.Store(1)
	return s, nil
}

// put caches s, or frees memory when the cache is full: that of other sizes
// first, because what was released last is what the next taker asks for.
func (p *Pool) put(s *Slab) {
	class := len(s.mem)
	s.pool = nil
	var dropped []*Slab
	p.mu.Lock()
	p.live -= int64(class)
	p.slabs--
	if int64(class) > p.limit {
		dropped = append(dropped, s)
	} else {
		dropped = p.cache.shrink(p.limit-int64(class), class)
		p.cache.free[class] = append(p.cache.free[class], s)
		p.cache.bytes += int64(class)
	}
	p.mu.Unlock()
	p.cache.drop(dropped)
}

// take removes a slab of a class that has one.
func (c *cache) take(class int) *Slab {
	list := c.free[class]
	s := list[len(list)-1]
	list[len(list)-1] = nil
	c.free[class] = list[:len(list)-1]
	c.bytes -= int64(class)
	return s
}

// shrink takes slabs out until at most the bytes named are left, or nothing; those
// of class go last. What it returns is for drop, without the lock.
func (c *cache) shrink(most int64, class int) (dropped []*Slab) {
	for c.bytes > max(most, 0) {
		from := class
		for other, list := range c.free {
			if other != class && len(list) > 0 {
				from = other
				break
			}
		}
		dropped = append(dropped, c.take(from))
	}
	return dropped
}

// drop frees the memory of slabs without references.
func (c *cache) drop(slabs []*Slab) {
	for _, s := range slabs {
		mem := s.mem
		s.mem = nil // a late reader meets an empty slab, not another's memory
		c.backing.Free(mem)
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
	return p.cache.bytes
}

// SizeOf returns the bytes that a slab of n bytes takes from a pool: what to ask
// a Budget for. Slabs are rounded up so that they are found again: to 4 KiB pages while
// small, to 64 KiB up to 2 MiB, to whole 2 MiB huge pages above. A size beyond 63 bits
// becomes the largest there is.
func SizeOf(n int64) int64 {
	switch {
	case n <= 64<<10:
		return PagesOf(n)
	case n <= hugePage:
		return roundUp(n, 64<<10)
	default:
		return roundUp(n, hugePage)
	}
}

// PagesOf is SizeOf for a slab of GetPages: whole pages of 4 KiB, at least one.
func PagesOf(n int64) int64 { return max(roundUp(n, 4<<10), 4<<10) }

func roundUp(n, unit int64) int64 {
	if n > math.MaxInt64-unit {
		return math.MaxInt64
	}
	return (n + unit - 1) / unit * unit
}
