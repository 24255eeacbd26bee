// Package chunker yields the chunks of one tensor as views into the memory its
// sender offered, in whatever order that memory came, and keeps the memory until
// the receiver has acknowledged it and nobody is still writing it out.
//
// It never copies a byte and never blocks. It refuses memory outside the tensor
// or offered twice. A Chunker belongs to one goroutine at a time; the regions it
// hands out may be released from any.
package chunker

import (
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
	regions []*region // ascending by offset, the acknowledged ones gone
	offered spans     // bytes, those skipped included
	ready   spans     // chunks that lie wholly in offered memory and were never taken
	again   []uint32  // chunks to be sent again, ascending
	acked   spans
	sent    spans // taken or skipped
	skipped spans // never sent and not acknowledged
	closed  bool

	// What nearly every tensor has; none is allocated by itself.
	first       [4]span
	firstRegion [1]*region
}

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

// spans are ranges, ascending and apart.
type spans []span

type span struct{ lo, hi int64 }

// search finds the first span that ends behind v.
func (s spans) search(v int64) int {
	return sort.Search(len(s), func(i int) bool { return s[i].hi > v })
}

// has reports whether all of [lo, hi) lies in one span.
func (s spans) has(lo, hi int64) bool {
	at := s.search(lo)
	return at < len(s) && s[at].lo <= lo && hi <= s[at].hi
}

// chunk reports whether a chunk lies in a span.
func (s spans) chunk(index uint32) bool { return s.has(int64(index), int64(index)+1) }

// meets reports whether some of [lo, hi) lies in a span.
func (s spans) meets(lo, hi int64) bool {
	at := s.search(lo)
	return at < len(s) && s[at].lo < hi
}

// add adds [lo, hi) to spans, and joins it with what it touches. It reports whether some of it was new.
func add(s *spans, lo, hi int64) (news bool) {
	if lo >= hi || s.has(lo, hi) {
		return false
	}
	from := sort.Search(len(*s), func(i int) bool { return (*s)[i].hi >= lo })
	to := from
	for ; to < len(*s) && (*s)[to].lo <= hi; to++ {
		lo, hi = min(lo, (*s)[to].lo), max(hi, (*s)[to].hi)
	}
	*s = slices.Replace(*s, from, to, span{lo, hi})
	return true
}

// prefix returns the end of the span that begins at 0, or 0.
func (s spans) prefix() int64 {
	if len(s) == 0 || s[0].lo > 0 {
		return 0
	}
	return s[0].hi
}

// New returns a chunker with nothing offered yet.
func New(geo tensor.Geometry) *Chunker {
	c := &Chunker{geo: geo}
	c.offered, c.ready, c.acked, c.sent = c.first[0:0:1], c.first[1:1:2], c.first[2:2:3], c.first[3:3:4]
	c.regions = c.firstRegion[:0]
	return c
}

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
	if c.offered.meets(off, off+n) || c.geo.Size == 0 && c.Offered() {
		return fmt.Errorf("%w: bytes [%d,+%d) were offered before", ErrOffer, off, n)
	}
	r := regionPool.Get().(*region)
	r.off, r.data, r.release = off, data, release
	r.refs.Store(1)
	c.regions = slices.Insert(c.regions, at, r)
	if c.geo.Size == 0 {
		add(&c.ready, 0, 1)
		return nil
	}
	add(&c.offered, off, off+n)
	// The chunks at both ends may be offered in part.
	all := c.offered[c.offered.search(off)]
	lo, hi := off/c.geo.ChunkBytes, (off+n-1)/c.geo.ChunkBytes+1
	if lo*c.geo.ChunkBytes < all.lo {
		lo++
	}
	if min(hi*c.geo.ChunkBytes, c.geo.Size) > all.hi {
		hi--
	}
	add(&c.ready, lo, hi)
	return nil
}

// Ready reports whether Take would find a chunk below limit.
func (c *Chunker) Ready(limit uint32) bool {
	return c.Again(limit) || len(c.ready) > 0 && c.ready[0].lo < int64(limit)
}

// Again reports whether Take would return a chunk that was taken before.
func (c *Chunker) Again(limit uint32) bool { return len(c.again) > 0 && c.again[0] < limit }

// Take takes the first chunk that waits below limit, those to be sent again first.
func (c *Chunker) Take(limit uint32) (index uint32, ok bool) {
	if !c.Ready(limit) {
		return 0, false
	}
	if c.Again(limit) {
		index = c.again[0]
		c.again = slices.Delete(c.again, 0, 1)
		return index, true
	}
	s := &c.ready[0]
	index = uint32(s.lo)
	if s.lo++; s.lo == s.hi {
		c.ready = slices.Delete(c.ready, 0, 1)
	}
	add(&c.sent, int64(index), int64(index)+1)
	return index, true
}

// Skip leaves out the chunks [lo, hi), which the receiver has. They count as sent. None of
// them was skipped before, and none may be offered.
func (c *Chunker) Skip(lo, hi uint32) {
	if c.closed {
		return
	}
	from, _ := c.geo.Span(lo)
	last, n := c.geo.Span(hi - 1)
	add(&c.offered, from, last+n)
	add(&c.skipped, int64(lo), int64(hi))
	add(&c.sent, int64(lo), int64(hi))
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
	if len(c.again) >= MaxResends && c.lost(index) {
		return fmt.Errorf("%w: more than %d chunks are to be sent again; take those first", ErrAck, MaxResends)
	}
	c.Lose(index)
	return nil
}

// Lose is like Resend, without the limit: the chunk was lost on its way. It reports whether
// the chunk did not wait before.
func (c *Chunker) Lose(index uint32) bool {
	lost := c.lost(index)
	if lost {
		at, _ := slices.BinarySearch(c.again, index)
		c.again = slices.Insert(c.again, at, index)
	}
	return lost
}

// lost reports whether a chunk was taken, is not acknowledged and does not wait.
func (c *Chunker) lost(index uint32) bool {
	_, waits := slices.BinarySearch(c.again, index)
	return !waits && !c.closed && !c.Has(index) && c.sent.chunk(index) && !c.skipped.chunk(index)
}

// Ack drops what the receiver holds: every chunk below the index, and those of the pairs
// [lo, hi) beyond. It reports whether one of them was not acknowledged before, and fails
// when the receiver claims to hold what was never sent.
func (c *Chunker) Ack(below uint32, beyond []uint32) (news bool, err error) {
	if sent := c.sent.prefix(); int64(below) > sent {
		return false, fmt.Errorf("%w: every chunk below %d, but only those below %d were sent", ErrAck, below, sent)
	}
	for r := range slices.Chunk(beyond, 2) {
		if !c.sent.has(int64(r[0]), int64(r[1])) {
			return false, fmt.Errorf("%w: the chunks [%d, %d), which were not all sent", ErrAck, r[0], r[1])
		}
	}
	if c.closed {
		return false, nil
	}
	news = add(&c.acked, 0, int64(below))
	for r := range slices.Chunk(beyond, 2) {
		news = add(&c.acked, int64(r[0]), int64(r[1])) || news
	}
	if !news {
		return false, nil
	}
	held := c.acked.prefix()
	end := min(held*c.geo.ChunkBytes, c.geo.Size)
	c.drop(sort.Search(len(c.regions), func(i int) bool { return c.regions[i].end() > end }))
	if last := c.acked[len(c.acked)-1]; last.hi > held {
		c.regions = slices.DeleteFunc(c.regions, func(r *region) bool {
			whole := c.acked.has(r.off/c.geo.ChunkBytes, (r.end()-1)/c.geo.ChunkBytes+1)
			if whole {
				r.Release()
			}
			return whole
		})
	}
	c.skipped = slices.DeleteFunc(c.skipped, func(s span) bool { return s.hi <= held })
	c.again = slices.DeleteFunc(c.again, c.Has) // resends that crossed the ack
	return true, nil
}

// Has reports whether the receiver has acknowledged a chunk.
func (c *Chunker) Has(index uint32) bool { return c.acked.chunk(index) }

// AckSent drops what was sent, up to the first chunk that is to be sent again: there is
// nobody any more who could acknowledge it.
func (c *Chunker) AckSent() {
	sent := c.sent.prefix()
	if len(c.again) > 0 {
		sent = min(sent, int64(c.again[0]))
	}
	if _, err := c.Ack(uint32(sent), nil); err != nil {
		panic(err)
	}
}

// Below returns the index below which the receiver holds every chunk.
func (c *Chunker) Below() uint32 { return uint32(c.acked.prefix()) }

// Unacked reports whether a chunk was taken, behind no gap, and is not acknowledged.
func (c *Chunker) Unacked() bool { return c.acked.prefix() < c.sent.prefix() }

func (c *Chunker) drop(n int) {
	for _, r := range c.regions[:n] {
		r.Release()
	}
	c.regions = slices.Delete(c.regions, 0, n)
}

// Offered reports whether the whole tensor has been offered.
func (c *Chunker) Offered() bool {
	return c.offered.prefix() == c.geo.Size && (c.geo.Size > 0 || len(c.regions)+len(c.acked) > 0)
}

// Sent reports whether the whole tensor has been offered and no chunk waits.
func (c *Chunker) Sent() bool { return c.Offered() && len(c.ready)+len(c.again) == 0 }

// Acked reports whether the receiver holds every chunk.
func (c *Chunker) Acked() bool { return c.Below() == c.geo.Count() }

// Close drops every region; views that are out keep theirs until released.
func (c *Chunker) Close() {
	c.closed = true
	c.drop(len(c.regions))
	c.ready, c.again = nil, nil
}
