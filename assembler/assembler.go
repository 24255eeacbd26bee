// Package assembler rebuilds one tensor from chunks that arrive in any order. Each chunk is
// written once, straight to its final place in memory that was lent for it, or by a Placer
// to where else the tensor rests, and counts only after its checksum has matched.
//
// It refuses chunks beyond the memory lent so far, chunks of a wrong length and a second
// content for the same index, before any byte is written. It owns no bytes: each piece of
// memory is lent until a function that came with it has run. An Assembler belongs to one
// goroutine at a time; only Claim.Copy may run beside it.
package assembler

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"sort"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/invariants"
	"github.com/tensorferry/tensorferry/tensor"
)

// Errors that end the tensor. Each text says promised and got.
var (
	// ErrRange is wrapped when a chunk's index or length does not exist in the tensor.
	ErrRange = errors.New("assembler: chunk out of range")
	// ErrCredit is wrapped when a chunk comes at or above the limit.
	ErrCredit = errors.New("assembler: chunk without credit")
	// ErrConflict is wrapped when an index arrives again with other bytes, undamaged.
	ErrConflict = errors.New("assembler: conflicting chunk")
	// ErrCodec is wrapped when a chunk comes in a codec that is not known here.
	ErrCodec = errors.New("assembler: unknown codec")
	// ErrCorrupt is wrapped when a chunk failed its checksum too often.
	ErrCorrupt = errors.New("assembler: corrupt chunk")
)

// A chunk's state byte: where it stands in the low bits, then how often its
// checksum failed, and in the high ones the codec it came in.
const (
	absent   = 0
	claimed  = 1
	held     = 2
	stand    = 3 // mask
	failure  = 4 // one failed checksum
	failures = 3 * failure
	coded    = 4 // the codec's place
)

// Placer takes a tensor's bytes to where they rest when that is not memory that
// can be lent: a file.
type Placer interface {
	// WriteViews borrows views, which belong to byte off of the tensor in order. Claim.Copy
	// calls it, on its goroutine, with bytes that have been checked, each chunk's once
	// unless its error made the caller try again.
	WriteViews(off int64, views [][]byte) error
}

// Assembler rebuilds one tensor.
type Assembler struct {
	id   tensor.ID
	geo  tensor.Geometry
	kind codec.Checksum
	to   Placer // nil: to the memory lent
	free func(done func(filled bool), filled bool)

	regions []region // lent and not yet full, ascending; full ones stay until those before are full
	lent    int64    // bytes lent so far: regions are contiguous from 0
	began   bool     // something was lent, perhaps of zero bytes
	claims  int      // open
	dropped bool

	state []uint8  // per chunk below the limit
	sums  []uint32 // checksum per chunk held or claimed, to tell a duplicate
	below uint32   // every chunk with a smaller index is held
	count uint32   // chunks held

	first struct { // what a tensor of one chunk needs; nothing else is allocated for it
		region [1]region
		state  [1]uint8
		sum    [1]uint32
	}
}

type region struct {
	off     int64
	mem     []byte
	missing int64
	full    bool
	done    func(filled bool)
}

// New returns an assembler for a tensor. Nothing can arrive before Lend. The
// assembler passes each done of Lend to free, which runs it, at once or later.
func New(id tensor.ID, geo tensor.Geometry, kind codec.Checksum, free func(done func(filled bool), filled bool)) *Assembler {
	a := &Assembler{id: id, geo: geo, kind: kind, free: free}
	a.regions, a.state, a.sums = a.first.region[:0], a.first.state[:0], a.first.sum[:0]
	return a
}

// Place has the bytes of a tensor go to p: every chunk has its place from then on, and
// nothing can be lent. Nothing was lent before.
func (a *Assembler) Place(p Placer) {
	a.to = p
	a.grow(a.geo.Size)
}

// Lend lends mem for the next bytes of the tensor, directly after those lent
// before, until done is passed to New's free: once, inside Lend, Commit or Drop.
// With true, every byte of mem is in place; with false, the tensor was dropped and
// mem may hold anything. No claim that could touch mem is open then.
//
// Lend panics after Drop, with a Placer, and when mem reaches past the tensor's
// end: those are defects of the lender, never of a peer.
func (a *Assembler) Lend(mem []byte, done func(filled bool)) {
	n := int64(len(mem))
	if a.to != nil || a.dropped || n > a.geo.Size-a.lent {
		panic(fmt.Sprintf("assembler: %d bytes lent at %d of a tensor of %d", n, a.lent, a.geo.Size))
	}
	a.regions = append(a.regions, region{off: a.lent, mem: mem, missing: n, done: done})
	a.grow(n)
	// An empty region has nothing to wait for, except in an empty tensor for its
	// one empty chunk.
	if n == 0 && (a.geo.Size > 0 || a.Whole()) {
		a.fill(&a.regions[len(a.regions)-1])
		a.retire()
	}
}

// grow gives the chunks of the next n bytes their places.
func (a *Assembler) grow(n int64) {
	a.lent += n
	a.began = true
	if grown := int(a.Limit()) - len(a.state); grown > 0 {
		a.state = append(a.state, make([]uint8, grown)...)
		a.sums = append(a.sums, make([]uint32, grown)...)
	}
}

// Hold counts the chunks of the next n bytes, directly after those lent before, as held:
// whoever lends has them. n ends a chunk, as what was lent before did. Hold panics as Lend
// does.
func (a *Assembler) Hold(n int64) {
	if end := a.lent + n; a.to != nil || a.dropped || n < 1 || end > a.geo.Size || a.lent%a.geo.ChunkBytes != 0 || end%a.geo.ChunkBytes != 0 && end < a.geo.Size {
		panic(fmt.Sprintf("assembler: %d bytes held at %d of a tensor of %d", n, a.lent, a.geo.Size))
	}
	from := len(a.state)
	a.grow(n)
	for i := from; i < len(a.state); i++ {
		a.state[i] = held
	}
	a.count += uint32(len(a.state) - from)
	a.advance()
}

// advance moves below up to the first chunk that is not held.
func (a *Assembler) advance() {
	for a.below < uint32(len(a.state)) && a.state[a.below]&stand == held {
		a.below++
	}
}

// Drop gives the tensor up: memory that is not full returns to its lender, at once
// or with the commit of the last open claim. Nothing can be lent or claimed any
// more; what was counted stays.
func (a *Assembler) Drop() {
	a.dropped = true
	a.state, a.sums = nil, nil
	if a.claims > 0 {
		return
	}
	for _, r := range a.regions {
		if !r.full {
			a.free(r.done, false)
		}
	}
	clear(a.regions) // they may be the assembler's own
	a.regions = nil
}

// Limit returns the chunk limit that the lent memory covers: every chunk with a
// smaller index has its place. It is 0 after Drop.
func (a *Assembler) Limit() uint32 {
	if !a.began || a.dropped {
		return 0
	}
	return a.geo.Below(a.lent)
}

// Below returns the index below which every chunk is held.
func (a *Assembler) Below() uint32 { return a.below }

// Beyond returns the first ranges of chunks held beyond Below, at most so many, as pairs of
// the first index and the one behind the last.
func (a *Assembler) Beyond(most int) (pairs []uint32) {
	for i, left := a.below, a.count-a.below; left > 0 && len(pairs) < 2*most && int(i) < len(a.state); {
		from := i
		for int(i) < len(a.state) && a.state[i]&stand == held {
			i++
		}
		if i > from {
			pairs = append(pairs, from, i)
			left -= i - from
		} else {
			i++
		}
	}
	return pairs
}

// Held returns how many chunks are held.
func (a *Assembler) Held() uint32 { return a.count }

// Has reports whether a chunk of the tensor is held.
func (a *Assembler) Has(index uint32) bool {
	return index < uint32(len(a.state)) && a.state[index]&stand == held
}

// Whole reports whether every chunk is held.
func (a *Assembler) Whole() bool { return a.count == a.geo.Count() }

// Claim is one chunk on its way into its place. It is reused from chunk to
// chunk by its owner.
type Claim struct {
	asm   *Assembler
	index uint32
	sum   uint32   // promised
	seed  uint32   // of the checksum
	dst   [][]byte // where the bytes go, in order; scratch with a Placer
	off   int64    // of the place
	n     int      // bytes of the place
	size  int      // bytes of the chunk, as it came
	kind  codec.Checksum
	codec codec.Codec
	again bool
	to    Placer

	decoded []byte // with a Placer: what was encoded, kept from claim to claim
}

// Index returns the chunk's index.
func (c *Claim) Index() uint32 { return c.index }

// Promised returns the checksum that the chunk came with.
func (c *Claim) Promised() uint32 { return c.sum }

// Again reports whether the chunk came before: whatever Commit says, nothing is missing.
func (c *Claim) Again() bool { return c.again }

// Claim decides about a chunk of n bytes in codec k before any of them is copied. If place
// is true, c is ready for Copy and must then be committed; otherwise the chunk is here
// already, or being copied. An error ends the tensor. A chunk that came before, and now
// promises another checksum, is claimed too: only Commit can tell damage from a conflict.
func (a *Assembler) Claim(c *Claim, index uint32, n int, k codec.Codec, sum uint32) (place bool, err error) {
	if index >= a.geo.Count() {
		return false, fmt.Errorf("%w: index %d of a tensor of %d chunks", ErrRange, index, a.geo.Count())
	}
	off, want := a.geo.Span(index)
	switch {
	case !k.Known():
		return false, fmt.Errorf("%w: chunk %d came in %v; send it in one that hello names", ErrCodec, index, k)
	case k == codec.None && int64(n) != want:
		return false, fmt.Errorf("%w: chunk %d has %d bytes, its place has %d", ErrRange, index, n, want)
	case k != codec.None && (n < 1 || int64(n) >= want):
		return false, fmt.Errorf("%w: chunk %d has %d bytes of %v, its place has %d; what is encoded must be shorter, and not empty", ErrRange, index, n, k, want)
	case index >= a.Limit():
		return false, fmt.Errorf("%w: index %d, the limit is %d; wait for credit", ErrCredit, index, a.Limit())
	}
	s := a.state[index]
	again := s&stand != absent
	// What came in another codec may be the same bytes: to find out would cost a decoding.
	if again && (codec.Codec(s>>coded) != k || a.sums[index] == sum) {
		return false, nil
	}
	a.claims++
	*c = Claim{
		asm: a, index: index, sum: sum, seed: a.kind.Seed(a.id, index), dst: c.dst[:0],
		off: off, n: int(want), size: n, kind: a.kind, codec: k, again: again, to: a.to, decoded: c.decoded,
	}
	if again {
		return true, nil
	}
	a.state[index] = s&failures | claimed | uint8(k)<<coded
	a.sums[index] = sum
	if a.to != nil {
		return true, nil
	}
	for i := a.find(off); want > 0; i++ {
		r := &a.regions[i]
		from := off - r.off
		part := min(want, int64(len(r.mem))-from)
		if part > 0 {
			c.dst = append(c.dst, r.mem[from:from+part])
		}
		off += part
		want -= part
	}
	return true, nil
}

// find returns the index in regions of the one that holds byte off.
func (a *Assembler) find(off int64) int {
	return sort.Search(len(a.regions), func(i int) bool {
		r := &a.regions[i]
		return r.off+int64(len(r.mem)) > off
	})
}

// Copy writes the chunk's bytes, borrowed as views in order, to their place and
// returns the checksum of the views; Commit takes both results. Bytes that go to a
// Placer or have to be decoded are written only when their checksum is the
// promised one, those of a chunk that came before never. The error is the Placer's own, or wraps codec.ErrDecode.
//
// Copy touches only claimed memory: it may run beside the assembler, and, without
// a Placer, beside the Copy of another claim.
func (c *Claim) Copy(views [][]byte) (got uint32, err error) {
	if c.to == nil && c.codec == codec.None && !c.again {
		return c.copy(views), nil
	}
	got = c.seed
	for _, v := range views {
		got = c.kind.Update(got, v)
	}
	switch {
	case got != c.sum || c.again:
		return got, nil
	case c.to == nil:
		return got, c.codec.Decode(c.dst, views)
	case c.codec == codec.None:
		return got, c.to.WriteViews(c.off, views)
	}
	// Not in memory that others wait for: a Placer may be slow, or its owner's.
	if len(c.decoded) < c.n {
		c.decoded = make([]byte, c.n)
	}
	c.dst = append(c.dst[:0], c.decoded[:c.n])
	if err := c.codec.Decode(c.dst, views); err != nil {
		return got, err
	}
	return got, c.to.WriteViews(c.off, c.dst)
}

// Fill reads the chunk's bytes from r straight to their place, and returns their checksum;
// Commit takes it. It sums pieces of codec.PieceBytes while they are in the cache. With an
// error, left bytes of the chunk were not read, and Abort ends the claim. What came in a
// codec lies at the beginning of its place then, until Decode. The place must be in memory
// that was lent, and the chunk must not have come before.
//
// Fill touches only claimed memory: it may run beside the assembler, and beside the Fill
// of another claim.
func (c *Claim) Fill(r io.Reader) (got uint32, left int, err error) {
	got, left = c.seed, c.size
	for _, dst := range c.dst {
		for left > 0 && len(dst) > 0 {
			piece := dst[:min(len(dst), left, codec.PieceBytes)]
			n, err := io.ReadFull(r, piece)
			left -= n
			if errors.Is(err, io.EOF) { // before a piece, and in the middle of the chunk
				err = io.ErrUnexpectedEOF
			}
			if err != nil {
				return got, left, err
			}
			got = c.kind.Update(got, piece)
			dst = dst[len(piece):]
		}
	}
	return got, left, nil
}

// Decode decodes what Fill has read, if it came in a codec and got is the promised checksum.
// Commit takes the error, which wraps codec.ErrDecode. Decode may run where Fill may.
func (c *Claim) Decode(got uint32) error {
	if c.codec == codec.None || got != c.sum {
		return nil
	}
	views, left := [][]byte{nil}, c.size // several, so that Decode joins them, and thereby copies them
	for _, d := range c.dst {
		views = append(views, d[:min(left, len(d))])
		left -= min(left, len(d))
	}
	return c.codec.Decode(c.dst, views)
}

// copy sums each view right after it was read for the copy, while it is in the cache.
func (c *Claim) copy(views [][]byte) uint32 {
	sum := c.seed
	d := 0
	var dst []byte
	for _, v := range views {
		sum = c.kind.Update(sum, v)
		for len(v) > 0 {
			for len(dst) == 0 {
				dst = c.dst[d]
				d++
			}
			n := copy(dst, v)
			dst, v = dst[n:], v[n:]
		}
	}
	return sum
}

// Commit ends a claim with what Copy returned. It reports whether the chunk now
// counts; if not, it is forgotten and must be sent again, unless it came before. An
// error ends the tensor: too many failures of one checksum, two different chunks with
// one index, or Copy's own. After Drop no chunk counts.
func (a *Assembler) Commit(c *Claim, got uint32, err error) (bool, error) {
	i := c.index
	invariants.Assert(c.asm == a && (c.again || a.dropped || a.state[i]&stand == claimed), "assembler: commit without a claim")
	switch {
	case a.end(c):
		return false, nil
	case c.again:
		if got == c.sum && a.Has(i) {
			return false, fmt.Errorf("%w: chunk %d came with checksum %08x and again with %08x", ErrConflict, i, a.sums[i], c.sum)
		}
		return false, nil
	case got != c.sum:
		a.state[i] = a.state[i]&failures + failure
		if a.state[i]/failure >= MaxCorrupt {
			return false, fmt.Errorf("%w: chunk %d arrived %d times with a wrong checksum (%08x promised, %08x got)",
				ErrCorrupt, i, MaxCorrupt, c.sum, got)
		}
		return false, nil
	case err != nil:
		a.state[i] &= failures
		return false, fmt.Errorf("assembler: chunk %d: %w", i, err)
	}
	a.state[i] = a.state[i]&^stand | held
	a.count++
	a.advance()
	if a.to != nil {
		return true, nil
	}
	off, n := a.geo.Span(i)
	if n == 0 { // the empty chunk of an empty tensor fills every region
		for k := range a.regions {
			a.fill(&a.regions[k])
		}
	}
	for r := a.find(off); n > 0; r++ {
		g := &a.regions[r]
		part := min(n, g.off+int64(len(g.mem))-off)
		if part == 0 {
			continue
		}
		if g.missing -= part; g.missing == 0 {
			a.fill(g)
		}
		off += part
		n -= part
	}
	a.retire()
	return true, nil
}

// Abort ends a claim whose bytes did not come: the chunk is as absent, or as held, as
// before, and was not damaged.
func (a *Assembler) Abort(c *Claim) {
	invariants.Assert(c.asm == a, "assembler: abort without a claim")
	if !a.end(c) && !c.again {
		a.state[c.index] &= failures
	}
}

// end counts a claim as open no more, and reports whether the tensor was dropped meanwhile: its
// memory returns with the last claim.
func (a *Assembler) end(c *Claim) (dropped bool) {
	c.asm, c.to = nil, nil
	clear(c.dst)
	if a.claims--; a.dropped {
		a.Drop()
	}
	return a.dropped
}

func (a *Assembler) fill(r *region) {
	r.full = true
	a.free(r.done, true)
}

// retire forgets full regions at the front: nobody can ask for them again.
func (a *Assembler) retire() {
	n := 0
	for n < len(a.regions) && a.regions[n].full {
		n++
	}
	a.regions = slices.Delete(a.regions, 0, n)
}
