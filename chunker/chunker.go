// Package chunker yields the chunks of one tensor as views into the memory its
// sender offered, in whatever order that memory came, and keeps the memory until
// the receiver has acknowledged it and nobody is still writing it out.
//
// It never copies a byte and never blocks. It refuses memory outside the tensor
// or offered twice. A Chunker belongs to one goroutine at a time; the regions it
// hands out may be released from any.
package chunker

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sort"
	"sync"
	"sync/atomic"

	"github.com/tensorferry/tensorferry/tensor"
)

// Errors of this package.
var (
	// ErrOffer is wrapped when offered memory does not fit the tensor.
	ErrOffer = errors.New("chunker: bad offer")
	// ErrAck is wrapped when a receiver acknowledges what was not sent.
	ErrAck = errors.New("chunker: bad acknowledgement")
)

// Releaser gives a shared view back, exactly once. Safe for concurrent use.
type Releaser interface{ Release() }

// Chunker cuts one tensor.
type Chunker struct {
	geo     tensor.Geometry
	regions []*region        // ascending by offset, the acknowledged ones gone
	ready   []span           // chunks that lie wholly in offered memory and were never taken, ascending
	again   []span           // chunks to be sent again, ascending
	partial map[uint32]int64 // bytes still missing of chunks offered in part
	below   uint32           // acknowledged
	sent    []span           // taken or skipped, ascending and apart
	skipped []span           // never sent and not acknowledged, ascending
	offered int64
	closed  bool
}

type span struct{ lo, hi uint32 }

// region is offered memory, shared by the chunker until acknowledged and by
// each view handed out until its Release.
type region struct {
	off     int64
	data    []byte
	refs    atomic.Int32
	release func()
}

var regionPool = sync.Pool{New: func() any { return new(region) }}

// Release drops one reference; the last one gives the memory back.
func (r *region) Release() {
	switch n := r.refs.Add(-1); {
	case n < 0:
		panic("chunker: region released more often than retained")
	case n == 0:
		f := r.release
		r.data, r.release = nil, nil
		regionPool.Put(r)
		if f != nil {
			f()
		}
	}
}

func (r *region) end() int64 { return r.off + int64(len(r.data)) }

// New returns a chunker with nothing offered yet.
func New(geo tensor.Geometry) *Chunker { return &Chunker{geo: geo} }

// Offer shares data as the tensor's bytes from off on. release, if not nil, runs
// once when every chunk of it is acknowledged, or the chunker is closed, and no
// view of it is out; it may run on any goroutine. When Offer fails it keeps
// nothing and release does not run.
func (c *Chunker) Offer(off int64, data []byte, release func()) error {
	n := int64(len(data))
	switch {
	case c.closed:
		return fmt.Errorf("%w: the chunker is closed", ErrOffer)
	case off < 0 || n > c.geo.Size || off > c.geo.Size-n:
		return fmt.Errorf("%w: bytes [%d,+%d) of a tensor of %d", ErrOffer, off, n, c.geo.Size)
	}
	if n == 0 && c.geo.Size > 0 {
		if release != nil {
			release() // nothing of it will ever be sent
		}
		return nil
	}
	at := len(c.regions)
	for at > 0 && c.regions[at-1].off > off { // nearly always the end
		at--
	}
	if at > 0 && c.regions[at-1].end() > off || at < len(c.regions) && c.regions[at].off < off+n ||
		off < min(int64(c.below)*c.geo.ChunkBytes, c.geo.Size) || c.geo.Size == 0 && c.Offered() {
		return fmt.Errorf("%w: bytes [%d,+%d) were offered before", ErrOffer, off, n)
	}
	r := regionPool.Get().(*region)
	r.off, r.data, r.release = off, data, release
	r.refs.Store(1)
	c.regions = slices.Insert(c.regions, at, r)
	c.offered += n
	if c.geo.Size == 0 {
		c.ready = join(c.ready, span{0, 1})
		return nil
	}
	c.cover(off, off+n)
	return nil
}

// cover makes ready the chunks that the bytes [from, to) complete.
func (c *Chunker) cover(from, to int64) {
	lo := uint32(from / c.geo.ChunkBytes)
	hi := uint32((to-1)/c.geo.ChunkBytes) + 1
	first, last := lo, hi-1
	if !c.edge(first, from, to) {
		lo++
	}
	if last > first && !c.edge(last, from, to) {
		hi--
	}
	if lo < hi {
		c.ready = join(c.ready, span{lo, hi})
	}
}

// edge counts the bytes [from, to) towards a chunk and reports whether it is complete.
func (c *Chunker) edge(index uint32, from, to int64) bool {
	off, n := c.geo.Span(index)
	part := min(to, off+n) - max(from, off)
	if part == n {
		return true
	}
	missing, ok := c.partial[index]
	if !ok {
		missing = n
	}
	if missing -= part; missing == 0 {
		delete(c.partial, index)
		return true
	}
	if c.partial == nil {
		c.partial = make(map[uint32]int64)
	}
	c.partial[index] = missing
	return false
}

// join adds s to ascending spans, none of which has a chunk of it, and joins it with
// those that it touches.
func join(spans []span, s span) []span {
	at := search(spans, s.lo)
	before, after := at > 0 && spans[at-1].hi == s.lo, at < len(spans) && spans[at].lo == s.hi
	switch {
	case before && after:
		spans[at-1].hi = spans[at].hi
		return slices.Delete(spans, at, at+1)
	case before:
		spans[at-1].hi = s.hi
	case after:
		spans[at].lo = s.lo
	default:
		return slices.Insert(spans, at, s)
	}
	return spans
}

// search finds the first of ascending spans that ends behind a chunk.
func search(spans []span, index uint32) int {
	at, _ := slices.BinarySearchFunc(spans, index, func(s span, index uint32) int { return cmp.Compare(uint64(s.hi), uint64(index)+1) })
	return at
}

// has reports whether a chunk lies in one of ascending spans.
func has(spans []span, index uint32) bool {
	at := search(spans, index)
	return at < len(spans) && spans[at].lo <= index
}

// Ready reports whether Take would find a chunk below limit.
func (c *Chunker) Ready(limit uint32) bool {
	return c.Again(limit) || len(c.ready) > 0 && c.ready[0].lo < limit
}

// Again reports whether Take would return a chunk that was taken before.
func (c *Chunker) Again(limit uint32) bool { return len(c.again) > 0 && c.again[0].lo < limit }

// first takes the first chunk of spans.
func first(spans *[]span) uint32 {
	s := &(*spans)[0]
	index := s.lo
	if s.lo++; s.lo == s.hi {
		*spans = slices.Delete(*spans, 0, 1)
	}
	return index
}

// Take takes the first chunk that waits below limit, those to be sent again first.
func (c *Chunker) Take(limit uint32) (index uint32, ok bool) {
	if !c.Ready(limit) {
		return 0, false
	}
	if c.Again(limit) {
		return first(&c.again), true
	}
	index = first(&c.ready)
	c.sent = join(c.sent, span{index, index + 1})
	return index, true
}

// taken returns the index below which every chunk was taken once, or skipped.
func (c *Chunker) taken() uint32 {
	if len(c.sent) == 0 || c.sent[0].lo > 0 {
		return 0
	}
	return c.sent[0].hi
}

// Skip leaves out the chunks [lo, hi), which the receiver has. They count as sent. They
// come after all that were skipped before, and must not be offered.
func (c *Chunker) Skip(lo, hi uint32) {
	if c.closed {
		return
	}
	from, _ := c.geo.Span(lo)
	last, n := c.geo.Span(hi - 1)
	c.offered += last + n - from
	c.skipped = append(c.skipped, span{lo, hi})
	c.sent = join(c.sent, span{lo, hi})
}

// View appends the chunk's bytes to views and shares them until the Releaser is
// released. The chunk must have been taken and not acknowledged.
func (c *Chunker) View(index uint32, views [][]byte) ([][]byte, Releaser) {
	off, n := c.geo.Span(index)
	lo := sort.Search(len(c.regions), func(i int) bool { return c.regions[i].end() > off || n == 0 })
	first := c.regions[lo]
	first.refs.Add(1)
	if off+n <= first.end() {
		return append(views, first.data[off-first.off:off-first.off+n]), first
	}
	all := group{first}
	for i := lo; n > 0; i++ {
		r := c.regions[i]
		if i > lo {
			r.refs.Add(1)
			all = append(all, r)
		}
		part := min(n, r.end()-off)
		views = append(views, r.data[off-r.off:off-r.off+part])
		off += part
		n -= part
	}
	return views, all
}

// group releases the regions of a chunk that lies across several.
type group []*region

// Release releases each region.
func (g group) Release() {
	for _, r := range g {
		r.Release()
	}
}

// Resend makes a chunk wait again, if it was taken and is not acknowledged. It
// fails when the receiver asks for more than MaxResends at a time.
func (c *Chunker) Resend(index uint32) error {
	if index < c.below || !has(c.sent, index) || has(c.skipped, index) || has(c.again, index) || c.closed {
		return nil
	}
	if len(c.again) >= MaxResends {
		return fmt.Errorf("%w: more than %d chunks are to be sent again; take those first", ErrAck, MaxResends)
	}
	c.again = slices.Insert(c.again, search(c.again, index), span{index, index + 1}) // apart from others: they are counted
	return nil
}

// Rewind makes every chunk wait again that was taken and is not acknowledged: nobody
// knows whether it arrives.
func (c *Chunker) Rewind() {
	if c.closed {
		return
	}
	c.again = c.again[:0]
	for _, s := range c.sent {
		lo := max(s.lo, c.below)
		for _, k := range append(c.skipped, span{s.hi, s.hi}) {
			if hi := min(k.lo, s.hi); lo < hi {
				c.again = append(c.again, span{lo, hi})
			}
			lo = max(lo, k.hi)
		}
	}
}

// Ack drops what the receiver holds: every chunk below the index. It fails when
// the receiver claims to hold what was never sent.
func (c *Chunker) Ack(below uint32) error {
	if below > c.taken() {
		return fmt.Errorf("%w: every chunk below %d, but only those below %d were sent", ErrAck, below, c.taken())
	}
	if below <= c.below || c.closed {
		return nil
	}
	c.below = below
	end := min(int64(below)*c.geo.ChunkBytes, c.geo.Size)
	c.drop(sort.Search(len(c.regions), func(i int) bool { return c.regions[i].end() > end }))
	c.skipped = slices.DeleteFunc(c.skipped, func(s span) bool { return s.hi <= below })
	c.again = slices.DeleteFunc(c.again, func(s span) bool { return s.hi <= below }) // resends that crossed the ack
	if len(c.again) > 0 {
		c.again[0].lo = max(c.again[0].lo, below)
	}
	return nil
}

// AckSent drops what was sent, up to the first chunk that is to be sent again: there is
// nobody any more who could acknowledge it.
func (c *Chunker) AckSent() {
	sent := c.taken()
	if len(c.again) > 0 {
		sent = min(sent, c.again[0].lo)
	}
	if err := c.Ack(sent); err != nil {
		panic(err)
	}
}

// Below returns the index below which the receiver holds every chunk.
func (c *Chunker) Below() uint32 { return c.below }

// Unacked returns how many chunks, without a gap, were taken and are not acknowledged.
func (c *Chunker) Unacked() uint32 { return c.taken() - c.below }

func (c *Chunker) drop(n int) {
	for _, r := range c.regions[:n] {
		r.Release()
	}
	c.regions = slices.Delete(c.regions, 0, n)
}

// Offered reports whether the whole tensor has been offered.
func (c *Chunker) Offered() bool {
	return c.offered == c.geo.Size && (c.offered > 0 || len(c.regions)+int(c.below) > 0)
}

// Sent reports whether the whole tensor has been offered and no chunk waits.
func (c *Chunker) Sent() bool { return c.Offered() && len(c.ready)+len(c.again) == 0 }

// Acked reports whether the receiver holds every chunk.
func (c *Chunker) Acked() bool { return c.below == c.geo.Count() }

// Close drops every region; views that are out keep theirs until released.
func (c *Chunker) Close() {
	c.closed = true
	c.drop(len(c.regions))
	c.ready, c.again, c.partial = nil, nil, nil
}
