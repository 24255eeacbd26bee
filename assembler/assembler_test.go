package assembler

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/iotest"

	"github.com/pierrec/lz4/v4"
	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/tensor"
)

var id = tensor.ID{1, 2, 3}

// bed is an assembler over memory with canaries around every region, and the
// bytes that belong there.
type bed struct {
	t       testing.TB
	a       *Assembler
	geo     tensor.Geometry
	data    []byte
	backing [][]byte // canary, region, canary
	lent    int64    // bytes
	full    []int    // how often each region came back full
	empty   []int    // and how often not full
	dropped bool
	claimed func(index uint32) bool // whether a claim is open, or nil
	claim   Claim
	disk    *disk // where the bytes go instead of to regions, or nil
}

// atOnce returns memory at once.
func atOnce(done func(filled bool), filled bool) { done(filled) }

// disk is a Placer that may be full.
type disk struct {
	mem    []byte
	writes int
	err    error
}

func (d *disk) WriteViews(off int64, views [][]byte) error {
	d.writes++
	if d.err != nil {
		return d.err
	}
	for _, v := range views {
		if n := copy(d.mem[off:], v); n < len(v) {
			return errors.New("disk: outside the tensor")
		}
		off += int64(len(v))
	}
	return nil
}

const (
	edge   = "\xC9canary\x9C"
	margin = len(edge)
	blank  = 0x55
)

func newBed(t testing.TB, size, chunk int64) *bed { return newBedOf(t, size, chunk, 1) }

// newBedOf returns a bed whose bytes come in runs, so that they can be compressed.
func newBedOf(t testing.TB, size, chunk int64, run int) *bed {
	t.Helper()
	geo, err := tensor.NewGeometry(size, chunk)
	require.NoError(t, err)
	b := &bed{t: t, a: New(id, geo, codec.CRC32C, atOnce), geo: geo, data: make([]byte, size)}
	r := rand.New(rand.NewPCG(uint64(size), uint64(chunk)))
	for i := range b.data {
		if b.data[i] = byte(r.Uint32()); i%run > 0 {
			b.data[i] = b.data[i-1]
		}
	}
	return b
}

// onDisk turns a bed into one whose bytes go to a Placer.
func (b *bed) onDisk() *bed {
	b.disk = &disk{mem: bytes.Repeat([]byte{blank}, len(b.data))}
	b.a = New(id, b.geo, codec.CRC32C, nil)
	b.a.Place(b.disk)
	return b
}

// squeeze returns a chunk as LZ4; nil when that is not shorter.
func (b *bed) squeeze(index uint32) []byte {
	p := b.payload(index)
	out := make([]byte, lz4.CompressBlockBound(len(p)))
	var c lz4.CompressorCCompat
	if n, err := c.CompressBlock(p, out); err == nil && n > 0 && n < len(p) {
		return out[:n]
	}
	return nil
}

// send delivers what is said to be a chunk, in views of piece bytes, and returns
// whether it counts now.
func (b *bed) send(index uint32, k codec.Codec, data []byte, piece int) (bool, bool, error) {
	v, err := b.a.Claim(&b.claim, index, len(data), k, b.sum(index, data))
	if err != nil || !v {
		return v, false, err
	}
	ok, err := b.settle(&b.claim, slices.Collect(slices.Chunk(data, max(1, piece))))
	return v, ok, err
}

func (b *bed) lend(n int64) {
	b.t.Helper()
	mem := slices.Concat([]byte(edge), bytes.Repeat([]byte{blank}, int(n)), []byte(edge))
	b.backing = append(b.backing, mem)
	b.full, b.empty = append(b.full, 0), append(b.empty, 0)
	i, off := len(b.full)-1, b.lent
	b.lent += n
	b.a.Lend(mem[margin:margin+int(n):margin+int(n)], func(filled bool) {
		for index := range b.geo.Count() {
			from, length := b.geo.Span(index)
			touches := !filled || from < off+n && from+length > off || b.geo.Size == 0
			if touches && b.claimed != nil && b.claimed(index) {
				b.t.Fatalf("region %d came back, filled %v, while chunk %d was being copied", i, filled, index)
			}
		}
		if filled {
			b.full[i]++
		} else {
			b.empty[i]++
		}
	})
}

func (b *bed) region(i int) []byte { return b.backing[i][margin : len(b.backing[i])-margin] }

func (b *bed) payload(index uint32) []byte {
	off, n := b.geo.Span(index)
	return b.data[off : off+n]
}

func (b *bed) sum(index uint32, data []byte) uint32 {
	return codec.CRC32C.Update(codec.CRC32C.Seed(id, index), data)
}

// settle copies a claimed chunk and commits it.
func (b *bed) settle(c *Claim, views [][]byte) (bool, error) {
	got, err := c.Copy(views)
	return b.a.Commit(c, got, err)
}

// place delivers a chunk in pieces of piece bytes, 0 for one view.
func (b *bed) place(index uint32, piece int) (bool, error) {
	p := b.payload(index)
	v, err := b.a.Claim(&b.claim, index, len(p), codec.None, b.sum(index, p))
	if err != nil || !v {
		return v, err
	}
	views := [][]byte{nil, p}
	if piece > 0 {
		views = slices.Collect(slices.Chunk(p, piece))
	}
	ok, err := b.settle(&b.claim, views)
	if err == nil && !ok {
		return v, errors.New("a good chunk did not count")
	}
	return v, err
}

// drop gives the tensor up.
func (b *bed) drop() {
	b.dropped = true
	b.a.Drop()
}

// check compares everything with the obvious: a region comes back full once and
// only when every byte of it is right, not full once and only after drop and
// without a claim, and no canary has moved.
func (b *bed) check(held func(uint32) bool) {
	b.t.Helper()
	off := int64(0)
	if b.disk != nil {
		for index := range b.geo.Count() {
			off, n := b.geo.Span(index)
			want := b.data[off : off+n]
			if !held(index) {
				want = bytes.Repeat([]byte{blank}, int(n))
			}
			if !bytes.Equal(b.disk.mem[off:off+n], want) {
				b.t.Fatalf("chunk %d on disk is wrong; held %v", index, held(index))
			}
		}
	}
	for i := range b.backing {
		r := b.region(i)
		n := int64(len(r))
		full := n > 0 || b.geo.Size > 0 || held(0)
		for at := off; at < off+n; {
			index := uint32(at / b.geo.ChunkBytes)
			full = full && held(index)
			from, length := b.geo.Span(index)
			end := min(from+length, off+n)
			if held(index) && !bytes.Equal(r[at-off:end-off], b.data[at:end]) {
				b.t.Fatalf("bytes [%d,%d) of region %d are wrong", at, end, i)
			}
			at = end
		}
		var want, wantEmpty int
		switch {
		case full:
			want = 1
		case b.dropped:
			wantEmpty = 1
		}
		if b.full[i] != want || b.empty[i] != wantEmpty {
			b.t.Fatalf("region %d at %d of %d bytes came back full %d times, not full %d times; want %d, %d", i, off, n, b.full[i], b.empty[i], want, wantEmpty)
		}
		if string(b.backing[i][:margin]) != edge || string(b.backing[i][margin+int(n):]) != edge {
			b.t.Fatalf("memory outside region %d was touched", i)
		}
		off += n
	}
}

// sizes is the boundary set for chunks of c bytes.
func sizes(c int64) []int64 {
	return []int64{0, 1, c - 1, c, c + 1, 2 * c, 2*c + 1}
}

// cuts are ways to lend n bytes.
func cuts(n, chunk int64) map[string][]int64 {
	by := func(step int64) (parts []int64) {
		for left := n; left > 0; left -= step {
			parts = append(parts, min(step, left))
		}
		return parts
	}
	all := map[string][]int64{
		"whole":               {n},
		"chunk by chunk":      by(chunk),
		"two chunks each":     by(2 * chunk),
		"straddling":          by(chunk + chunk/2 + 1),
		"third of a chunk":    by(chunk/3 + 1),
		"empty ones between":  slices.Concat([]int64{0}, by(chunk), []int64{0, 0}),
		"odd then everything": {n / 3, n - n/3},
	}
	if n <= 64 {
		all["one byte each"] = by(1)
	}
	if n == 0 {
		all["empty twice"] = []int64{0, 0}
	}
	return all
}

func TestChunksInAnyOrderFillRegionsOfAnyCut(t *testing.T) {
	for _, chunk := range []int64{1, 2, 7, 1024, 1025, 16383, 16384, 16385} {
		for _, size := range sizes(chunk) {
			for name, cut := range cuts(size, chunk) {
				t.Run(fmt.Sprintf("chunk=%d/size=%d/%s", chunk, size, name), func(t *testing.T) {
					for trial := range uint64(4) {
						b := newBed(t, size, chunk)
						for _, n := range cut {
							b.lend(n)
						}
						if len(cut) == 0 {
							b.lend(0)
						}
						order := rand.New(rand.NewPCG(trial, 0)).Perm(int(b.geo.Count()))
						if trial == 0 {
							slices.Sort(order)
						}
						held := map[uint32]bool{}
						for _, i := range order {
							v, err := b.place(uint32(i), int(trial)*int(chunk/3))
							require.NoError(t, err)
							require.True(t, v)
							held[uint32(i)] = true
							b.check(func(i uint32) bool { return held[i] })
						}
						require.True(t, b.a.Whole())
						require.Equal(t, b.geo.Count(), b.a.Below())
						require.Equal(t, b.geo.Count(), b.a.Held())
					}
				})
			}
		}
	}
}

// Memory that is lent late raises the limit only by what it covers wholly.
func TestLimitFollowsTheMemoryLent(t *testing.T) {
	b := newBed(t, 25, 10)
	require.Zero(t, b.a.Limit())
	_, err := b.place(0, 0)
	require.ErrorIs(t, err, ErrCredit)
	for _, step := range []struct {
		lend  int64
		limit uint32
	}{{9, 0}, {1, 1}, {0, 1}, {9, 1}, {5, 2}, {1, 3}} {
		b.lend(step.lend)
		require.Equal(t, step.limit, b.a.Limit(), "after %d bytes", b.lent)
		if step.limit < 3 {
			_, err := b.place(step.limit, 0)
			require.ErrorIs(t, err, ErrCredit)
		}
		if step.limit > 0 {
			_, err := b.place(step.limit-1, 3)
			require.NoError(t, err)
		}
	}
	require.True(t, b.a.Whole())
	b.check(func(uint32) bool { return true })
}

func TestAnEmptyTensorIsOneEmptyChunk(t *testing.T) {
	b := newBed(t, 0, 4)
	_, err := b.place(0, 0)
	require.ErrorIs(t, err, ErrCredit, "even no bytes need a place")
	b.lend(0)
	require.EqualValues(t, 1, b.a.Limit())
	require.False(t, b.a.Whole())
	b.check(func(uint32) bool { return false })
	_, err = b.place(0, 0)
	require.NoError(t, err)
	require.True(t, b.a.Whole())
	b.check(func(uint32) bool { return true })
	b.lend(0) // has nothing to wait for any more
	b.check(func(uint32) bool { return true })
}

func TestMemoryBeyondTheTensorIsRefused(t *testing.T) {
	b := newBed(t, 10, 4)
	b.lend(7)
	require.Panics(t, func() { b.a.Lend(make([]byte, 4), nil) })
	b.lend(3)
	require.Panics(t, func() { b.a.Lend(make([]byte, 1), nil) })
}

func TestADroppedTensorReturnsItsMemoryWithTheLastClaim(t *testing.T) {
	b := newBed(t, 12, 4)
	b.lend(4)
	b.lend(6)
	b.lend(2)
	_, err := b.place(0, 0)
	require.NoError(t, err)
	p := b.payload(1)
	v, err := b.a.Claim(&b.claim, 1, len(p), codec.None, b.sum(1, p))
	require.NoError(t, err)
	require.True(t, v)
	b.drop()
	require.Zero(t, b.empty[1]+b.empty[2], "a claim is open")
	ok, err := b.settle(&b.claim, [][]byte{p})
	require.NoError(t, err)
	require.False(t, ok)
	require.Equal(t, []int{1, 0, 0}, b.full)
	require.Equal(t, []int{0, 1, 1}, b.empty)
	b.drop()
	require.Equal(t, []int{0, 1, 1}, b.empty)
	require.EqualValues(t, 1, b.a.Held(), "what was counted stays")
	require.EqualValues(t, 1, b.a.Below())
	_, err = b.place(2, 0)
	require.ErrorIs(t, err, ErrCredit)
	require.Panics(t, func() { b.a.Lend(nil, nil) })
}

func TestATensorDroppedWithoutAClaimReturnsItsMemoryAtOnce(t *testing.T) {
	for name, whole := range map[string]bool{"whole": true, "not whole": false} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, 0, 4)
			b.lend(0)
			if whole {
				_, err := b.place(0, 0)
				require.NoError(t, err)
			}
			b.drop()
			b.check(func(uint32) bool { return whole })
			require.Equal(t, whole, b.a.Whole())
		})
	}
}

func TestBadChunksAreRefusedBeforeAByteIsWritten(t *testing.T) {
	for name, tc := range map[string]struct {
		index uint32
		n     int
		want  error
	}{
		"one byte short":          {0, 3, ErrRange},
		"one byte long":           {0, 5, ErrRange},
		"empty":                   {0, 0, ErrRange},
		"last as long as others":  {2, 4, ErrRange},
		"one past the last":       {3, 4, ErrRange},
		"index near 2^32":         {1<<32 - 1, 4, ErrRange},
		"above the limit":         {1, 4, ErrCredit},
		"last without its memory": {2, 2, ErrCredit},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, 10, 4)
			b.lend(7)
			_, err := b.a.Claim(&b.claim, tc.index, tc.n, codec.None, 0)
			require.ErrorIs(t, err, tc.want)
			require.Equal(t, bytes.Repeat([]byte{blank}, 7), b.region(0))
			_, err = b.place(0, 0)
			require.NoError(t, err, "the assembler itself lives on")
		})
	}
}

func TestAChunkTwiceIsDroppedAndAnotherContentIsAConflict(t *testing.T) {
	b := newBed(t, 8, 4)
	b.lend(8)
	p := b.payload(0)
	sum := b.sum(0, p)
	v, err := b.a.Claim(&b.claim, 0, 4, codec.None, sum)
	require.NoError(t, err)
	require.True(t, v)

	// While it is being copied.
	var second Claim
	v, err = b.a.Claim(&second, 0, 4, codec.None, sum)
	require.NoError(t, err)
	require.False(t, v)
	other := []byte{9, 9, 9, 9}
	again := func(sum uint32, views ...[]byte) error {
		v, err := b.a.Claim(&second, 0, 4, codec.None, sum)
		require.NoError(t, err)
		require.True(t, v)
		require.True(t, second.Again())
		ok, err := b.settle(&second, views)
		require.False(t, ok)
		return err
	}
	require.NoError(t, again(b.sum(0, other), other), "which of the two is damaged is not known yet")

	// And once it is held.
	ok, err := b.settle(&b.claim, [][]byte{p})
	require.NoError(t, err)
	require.True(t, ok)
	v, err = b.a.Claim(&second, 0, 4, codec.None, sum)
	require.NoError(t, err)
	require.False(t, v)
	for range 2 * MaxCorrupt { // damage, which is counted nowhere
		require.NoError(t, again(sum+1, p))
		require.NoError(t, again(b.sum(0, other), p))
	}
	require.ErrorIs(t, again(b.sum(0, other), other[:1], other[1:]), ErrConflict)
	require.EqualValues(t, 1, b.a.Held())
	b.check(func(i uint32) bool { return i == 0 })
}

func TestACorruptChunkIsForgottenUntilTheThirdTime(t *testing.T) {
	b := newBed(t, 8, 4)
	b.lend(8)
	bad := []byte{9, 9, 9, 9}
	for i := 1; i <= MaxCorrupt; i++ {
		v, err := b.a.Claim(&b.claim, 1, 4, codec.None, b.sum(1, b.payload(1)))
		require.NoError(t, err)
		require.True(t, v)
		ok, err := b.settle(&b.claim, [][]byte{bad[:1], bad[1:]})
		require.False(t, ok)
		if i < MaxCorrupt {
			require.NoError(t, err)
		} else {
			require.ErrorIs(t, err, ErrCorrupt)
		}
		require.Zero(t, b.a.Held())
		b.check(func(uint32) bool { return false })
	}
}

func TestAChunkCorruptTwiceStillCountsTheThirdTime(t *testing.T) {
	b := newBed(t, 8, 4)
	b.lend(8)
	for range MaxCorrupt - 1 { // the promise may be what is wrong, and differ each time
		_, err := b.a.Claim(&b.claim, 0, 4, codec.None, rand.Uint32())
		require.NoError(t, err)
		ok, err := b.settle(&b.claim, [][]byte{b.payload(0)})
		require.NoError(t, err)
		require.False(t, ok)
	}
	_, err := b.place(0, 1)
	require.NoError(t, err)
	b.check(func(i uint32) bool { return i == 0 })
}

func TestAChunkUnderAnotherNameFailsItsChecksum(t *testing.T) {
	b := newBed(t, 8, 4)
	b.lend(8)
	same := b.payload(0)
	_, err := b.a.Claim(&b.claim, 1, 4, codec.None, b.sum(0, same)) // chunk 0 delivered as chunk 1
	require.NoError(t, err)
	ok, err := b.settle(&b.claim, [][]byte{same})
	require.NoError(t, err)
	require.False(t, ok)
}

func TestCopyTakesAnySplitOfViews(t *testing.T) {
	const size, chunk = 12, 6 // regions of 5: the chunks straddle
	for mask := range 1 << (chunk - 1) {
		b := newBed(t, size, chunk)
		b.lend(5)
		b.lend(5)
		b.lend(2)
		for index := range uint32(2) {
			p := b.payload(index)
			var views [][]byte
			from := 0
			for i := 1; i <= chunk; i++ {
				if i == chunk || mask>>(i-1)&1 == 1 {
					views = append(views, p[from:i], nil)
					from = i
				}
			}
			v, err := b.a.Claim(&b.claim, index, chunk, codec.None, b.sum(index, p))
			require.NoError(t, err)
			require.True(t, v)
			ok, err := b.settle(&b.claim, views)
			require.NoError(t, err)
			require.True(t, ok, "split %b", mask)
		}
		b.check(func(uint32) bool { return true })
	}
}

// Two claims of one assembler may be copied side by side; -race watches.
func TestTwoClaimsAreCopiedSideBySide(t *testing.T) {
	b := newBed(t, 2048, 1024)
	b.lend(1000)
	b.lend(1048)
	var claims [2]Claim
	var sums [2]chan uint32
	for i := range claims {
		p := b.payload(uint32(i))
		_, err := b.a.Claim(&claims[i], uint32(i), len(p), codec.None, b.sum(uint32(i), p))
		require.NoError(t, err)
		sums[i] = make(chan uint32, 1)
		go func() {
			got, _ := claims[i].Copy([][]byte{p})
			sums[i] <- got
		}()
	}
	for i := range claims {
		ok, err := b.a.Commit(&claims[i], <-sums[i], nil)
		require.NoError(t, err)
		require.True(t, ok)
	}
	b.check(func(uint32) bool { return true })
}

func TestChunksInACodecFillRegionsOfAnyCut(t *testing.T) {
	for _, chunk := range []int64{64, 1024, 1025, 16384} {
		for _, size := range sizes(chunk) {
			for name, cut := range cuts(size, chunk) {
				t.Run(fmt.Sprintf("chunk=%d/size=%d/%s", chunk, size, name), func(t *testing.T) {
					b := newBedOf(t, size, chunk, 37)
					for _, n := range cut {
						b.lend(n)
					}
					if len(cut) == 0 {
						b.lend(0)
					}
					held := map[uint32]bool{}
					for _, i := range rand.New(rand.NewPCG(3, 0)).Perm(int(b.geo.Count())) {
						index := uint32(i)
						k, data := codec.LZ4, b.squeeze(index)
						if data == nil || i%3 == 2 { // some as they are
							k, data = codec.None, b.payload(index)
						}
						v, ok, err := b.send(index, k, data, 1+int(chunk)/5)
						require.NoError(t, err)
						require.True(t, v)
						require.True(t, ok)
						held[index] = true
						b.check(func(i uint32) bool { return held[i] })
					}
					require.True(t, b.a.Whole())
				})
			}
		}
	}
}

func TestAPlacerGetsEachChunkOnceAndOnlyWhenItIsRight(t *testing.T) {
	for _, chunk := range []int64{64, 1025} {
		for _, size := range sizes(chunk) {
			t.Run(fmt.Sprintf("chunk=%d/size=%d", chunk, size), func(t *testing.T) {
				b := newBedOf(t, size, chunk, 37).onDisk()
				require.Equal(t, b.geo.Count(), b.a.Limit(), "every chunk has its place from the start")
				require.Panics(t, func() { b.a.Lend(make([]byte, 1), nil) })
				held := map[uint32]bool{}
				for _, i := range rand.New(rand.NewPCG(4, 0)).Perm(int(b.geo.Count())) {
					index := uint32(i)
					k, data := codec.LZ4, b.squeeze(index)
					if data == nil || i%2 == 1 {
						k, data = codec.None, b.payload(index)
					}
					if len(data) > 0 {
						bad := bytes.Clone(data)
						bad[len(bad)/2] ^= 1
						v, err := b.a.Claim(&b.claim, index, len(data), k, b.sum(index, data))
						require.NoError(t, err)
						require.True(t, v)
						writes := b.disk.writes
						ok, err := b.settle(&b.claim, [][]byte{bad})
						require.NoError(t, err)
						require.False(t, ok)
						require.Equal(t, writes, b.disk.writes, "nothing is placed that fails its checksum")
					}
					require.False(t, b.a.Has(index))
					v, ok, err := b.send(index, k, data, 100)
					require.NoError(t, err)
					require.True(t, v)
					require.True(t, ok)
					held[index] = true
					require.True(t, b.a.Has(index))
					b.check(func(i uint32) bool { return held[i] })
				}
				require.True(t, b.a.Whole())
				require.EqualValues(t, b.geo.Count(), b.disk.writes)
				require.False(t, b.a.Has(b.geo.Count()))
			})
		}
	}
}

func TestThePlacersErrorEndsTheTensor(t *testing.T) {
	full := errors.New("disk full")
	for _, k := range []codec.Codec{codec.None, codec.LZ4} {
		b := newBedOf(t, 400, 200, 50).onDisk()
		data := b.payload(1)
		if k == codec.LZ4 {
			data = b.squeeze(1)
		}
		b.disk.err = full
		_, ok, err := b.send(1, k, data, 7)
		require.ErrorIs(t, err, full)
		require.ErrorContains(t, err, "chunk 1")
		require.False(t, ok)
		require.False(t, b.a.Has(1))
		b.check(func(uint32) bool { return false })
	}
}

func TestAChunkInACodecIsShorterThanItsPlaceAndNotEmpty(t *testing.T) {
	for name, tc := range map[string]struct {
		k    codec.Codec
		n    int
		want error
	}{
		"empty":                 {codec.LZ4, 0, ErrRange},
		"as long as its place":  {codec.LZ4, 100, ErrRange},
		"longer than its place": {codec.LZ4, 101, ErrRange},
		"one shorter":           {codec.LZ4, 99, nil},
		"one byte":              {codec.LZ4, 1, nil},
		"one of the future":     {2, 50, ErrCodec},
		"no codec's number":     {255, 50, ErrCodec},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, 100, 100)
			b.lend(100)
			_, err := b.a.Claim(&b.claim, 0, tc.n, tc.k, 0)
			require.ErrorIs(t, err, tc.want)
		})
	}
	b := newBed(t, 0, 100)
	b.lend(0)
	_, err := b.a.Claim(&b.claim, 0, 0, codec.LZ4, 0)
	require.ErrorIs(t, err, ErrRange, "there is nothing shorter than nothing")
}

func TestWhatPassesItsChecksumAndDoesNotDecodeEndsTheTensor(t *testing.T) {
	for name, garble := range map[string]func(b []byte) []byte{
		"cut short":     func(b []byte) []byte { return b[:len(b)-1] },
		"a byte more":   func(b []byte) []byte { return append(b, 0) },
		"no block":      func(b []byte) []byte { return bytes.Repeat([]byte{0xff}, len(b)) },
		"too few bytes": func([]byte) []byte { return []byte{0x10, 'x'} },
	} {
		for where, prepare := range map[string]func(b *bed){
			"one region":  func(b *bed) { b.lend(400) },
			"two regions": func(b *bed) { b.lend(300); b.lend(100) },
			"a file":      func(b *bed) { b.onDisk() },
		} {
			t.Run(name+"/"+where, func(t *testing.T) {
				b := newBedOf(t, 400, 200, 50)
				prepare(b)
				good := b.squeeze(1)
				_, ok, err := b.send(1, codec.LZ4, garble(bytes.Clone(good)), 9)
				require.ErrorIs(t, err, codec.ErrDecode)
				require.False(t, ok)
				b.check(func(uint32) bool { return false })
				_, ok, err = b.send(1, codec.LZ4, good, 9)
				require.NoError(t, err, "the assembler itself lives on")
				require.True(t, ok)
				b.check(func(i uint32) bool { return i == 1 })
			})
		}
	}
}

func TestADamagedChunkInACodecIsNotDecodedAndMayComeAgain(t *testing.T) {
	b := newBedOf(t, 400, 200, 50)
	b.lend(400)
	good := b.squeeze(0)
	for range MaxCorrupt - 1 {
		v, err := b.a.Claim(&b.claim, 0, len(good), codec.LZ4, b.sum(0, good))
		require.NoError(t, err)
		require.True(t, v)
		bad := bytes.Clone(good)
		bad[rand.IntN(len(bad))] ^= 4
		ok, err := b.settle(&b.claim, [][]byte{bad})
		require.NoError(t, err)
		require.False(t, ok)
		require.Equal(t, bytes.Repeat([]byte{blank}, 400), b.region(0))
	}
	_, ok, err := b.send(0, codec.None, b.payload(0), 50) // again, as it is
	require.NoError(t, err)
	require.True(t, ok)
	b.check(func(i uint32) bool { return i == 0 })
}

func TestAChunkAgainInAnotherCodecIsDropped(t *testing.T) {
	for name, first := range map[string]codec.Codec{"first as it is": codec.None, "first in lz4": codec.LZ4} {
		t.Run(name, func(t *testing.T) {
			b := newBedOf(t, 400, 200, 50)
			b.lend(400)
			forms := map[codec.Codec][]byte{codec.None: b.payload(0), codec.LZ4: b.squeeze(0)}
			second := codec.LZ4 - first
			_, ok, err := b.send(0, first, forms[first], 50)
			require.NoError(t, err)
			require.True(t, ok)
			for _, k := range []codec.Codec{first, second} {
				v, _, err := b.send(0, k, forms[k], 50)
				require.NoError(t, err)
				require.False(t, v)
			}
			forms[second][len(forms[second])-1] ^= 1
			v, _, err := b.send(0, second, forms[second], 50)
			require.NoError(t, err, "nobody knows what is in it")
			require.False(t, v)
			other := bytes.Clone(forms[first])
			other[0] ^= 1
			_, _, err = b.send(0, first, other, 50)
			require.ErrorIs(t, err, ErrConflict)
		})
	}
}

// Decoding to one region, to several and to a file.
func TestDecodingAllocatesNothing(t *testing.T) {
	const chunk, chunks = 4096, 64
	for name, prepare := range map[string]func(b *bed){
		"one region": func(b *bed) { b.a.Lend(make([]byte, chunk*chunks), func(bool) {}) },
		"straddling": func(b *bed) {
			for left := chunk * chunks; left > 0; left -= 1000 {
				b.a.Lend(make([]byte, min(1000, left)), func(bool) {})
			}
		},
		"a file": func(b *bed) { b.onDisk() },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBedOf(t, chunk*chunks, chunk, 20)
			prepare(b)
			var payloads [][][]byte
			for i := range uint32(chunks) {
				p := b.squeeze(i)
				payloads = append(payloads, [][]byte{p[:len(p)/2], p[len(p)/2:]})
			}
			index := uint32(0)
			one := func() {
				views := payloads[index]
				sum := codec.CRC32C.Seed(id, index)
				for _, v := range views {
					sum = codec.CRC32C.Update(sum, v)
				}
				if _, err := b.a.Claim(&b.claim, index, len(views[0])+len(views[1]), codec.LZ4, sum); err != nil {
					t.Fatal(err)
				}
				if ok, err := b.settle(&b.claim, views); err != nil || !ok {
					t.Fatal(ok, err)
				}
				index++
			}
			for range 10 {
				one()
			}
			if n := testing.AllocsPerRun(chunks-12, one); n != 0 {
				t.Errorf("%v allocations per chunk, want 0", n)
			}
		})
	}
}

func TestSteadyStateAllocatesNothing(t *testing.T) {
	const chunk, chunks = 256, 4096
	b := newBed(t, chunk*chunks, chunk)
	views := make([][]byte, 1)
	mem := make([]byte, chunk*chunks)
	const step = 1000 // bytes per region: chunks straddle
	full := 0
	count := func(filled bool) {
		if filled {
			full++
		}
	}
	for off := 0; off < len(mem); off += step {
		b.a.Lend(mem[off:min(off+step, len(mem))], count)
	}
	index := uint32(0)
	one := func() {
		p := b.payload(index)
		v, err := b.a.Claim(&b.claim, index, chunk, codec.None, b.sum(index, p))
		if err != nil || !v {
			t.Fatal(v, err)
		}
		views[0] = p
		if ok, err := b.settle(&b.claim, views); err != nil || !ok {
			t.Fatal(ok, err)
		}
		index++
	}
	for range 100 {
		one()
	}
	if n := testing.AllocsPerRun(3000, one); n != 0 {
		t.Errorf("%v allocations per chunk, want 0", n)
	}
	require.NotZero(t, full)
	require.Equal(t, b.data[:full*step], mem[:full*step])
}

// BenchmarkChunk places chunks of 256 bytes in regions of 1000.
func BenchmarkChunk(b *testing.B) {
	const chunk, step = 256, 1000
	size := int64(b.N) * chunk
	geo, err := tensor.NewGeometry(size, chunk)
	require.NoError(b, err)
	a, mem, views := New(id, geo, codec.CRC32C, atOnce), make([]byte, size), [][]byte{make([]byte, chunk)}
	sum := func(i uint32) uint32 { return codec.CRC32C.Update(codec.CRC32C.Seed(id, i), views[0]) }
	b.ReportAllocs()
	b.SetBytes(chunk)
	var c Claim
	off := int64(0)
	b.ResetTimer()
	for i := range uint32(b.N) {
		for a.Limit() <= i {
			n := min(step, size-off)
			a.Lend(mem[off:off+n], func(bool) {})
			off += n
		}
		if v, err := a.Claim(&c, i, chunk, codec.None, sum(i)); err != nil || !v {
			b.Fatal(v, err)
		}
		got, err := c.Copy(views)
		if ok, err := a.Commit(&c, got, err); err != nil || !ok {
			b.Fatal(ok, err)
		}
	}
}

// onDisk in a size makes FuzzAssembler use a Placer.
const onDisk = 1 << 15

// FuzzAssembler runs a script against an assembler and a model that keeps one
// flag per chunk. A script byte pair is an operation and its argument.
func FuzzAssembler(f *testing.F) {
	f.Add(uint16(10), uint16(4), []byte{0, 10, 1, 0, 1, 1, 1, 2})
	f.Add(uint16(0), uint16(1), []byte{1, 0, 0, 0, 1, 0, 0, 0})
	f.Add(uint16(33), uint16(8), []byte{0, 3, 0, 9, 1, 0, 2, 0, 3, 0, 0, 30, 1, 4, 4, 3, 5, 2})
	f.Add(uint16(20), uint16(3), []byte{0, 20, 4, 1, 4, 1, 4, 1})
	f.Add(uint16(64), uint16(16), []byte{0, 64, 7, 0, 7, 1, 8, 1, 8, 0, 7, 3, 7, 2, 8, 0, 8, 0})
	f.Add(uint16(200), uint16(100), []byte{0, 120, 9, 0, 9, 0, 1, 0, 0, 80, 11, 1, 11, 1, 9, 1, 10, 1})
	f.Add(uint16(onDisk|200), uint16(100), []byte{9, 0, 9, 0, 1, 0, 11, 1, 10, 1, 9, 1})
	f.Fuzz(func(t *testing.T, size, chunk uint16, script []byte) {
		geo, err := tensor.NewGeometry(int64(size%512), int64(chunk%128))
		if err != nil || geo.Count() > 64 || len(script) > 256 {
			return // longer ones find nothing that shorter ones do not
		}
		b := newBedOf(t, geo.Size, geo.ChunkBytes, 24)
		if size&onDisk != 0 {
			b.onDisk()
		}
		var (
			held    = make([]bool, geo.Count())
			copying = make([]bool, geo.Count())
			corrupt = make([]int, geo.Count())
			came    = make([]codec.Codec, geo.Count()) // in which it is held or copied
			open    []*Claim
		)
		limit := func() uint32 { // slow and obvious
			if b.disk != nil {
				return geo.Count()
			}
			if len(b.backing) == 0 {
				return 0
			}
			n := uint32(0)
			for n < geo.Count() {
				if off, length := geo.Span(n); off+length > b.lent {
					break
				}
				n++
			}
			return n
		}
		commit := func(c *Claim, views [][]byte, good bool) bool {
			i := c.Index()
			copying[i] = false
			ok, err := b.settle(c, views)
			if !good {
				corrupt[i]++
			}
			if wantErr := !good && corrupt[i] == MaxCorrupt; errors.Is(err, ErrCorrupt) != wantErr || ok != good {
				t.Fatalf("chunk %d committed with %v, %v; good is %v, corrupt %d times", i, ok, err, good, corrupt[i])
			}
			held[i] = held[i] || good
			return err == nil
		}
		b.claimed = func(index uint32) bool { return copying[index] }
		defer func() { // given up: nothing comes back before the last claim has ended
			if t.Failed() {
				return
			}
			b.drop()
			for i, c := range open {
				if slices.Max(append(b.empty, 0)) > 0 {
					t.Fatalf("memory came back with %d claims open", len(open)-i)
				}
				copying[c.Index()] = false
				if ok, err := b.settle(c, [][]byte{b.payload(c.Index())}); ok || err != nil {
					t.Fatalf("chunk %d of a dropped tensor: %v, %v", c.Index(), ok, err)
				}
			}
			if b.disk == nil {
				b.check(func(i uint32) bool { return held[i] })
			}
		}()
		for ; len(script) >= 2; script = script[2:] {
			arg := script[1]
			index := uint32(arg) % (geo.Count() + 1) // one too many, too
			switch op := script[0] % 12; op {
			case 0:
				if b.disk == nil {
					b.lend(min(int64(arg), geo.Size-b.lent))
				}
			default:
				var p []byte
				if index < geo.Count() {
					p = b.payload(index)
				}
				k, place := codec.None, len(p)
				if op >= 9 && index < geo.Count() { // in a codec, if that is possible
					if short := b.squeeze(index); short != nil {
						k, p = codec.LZ4, short
					}
				}
				if op == 10 && k == codec.LZ4 {
					p = p[:len(p)-1] // decodes to nothing
				}
				n, sum := len(p), b.sum(index, p)
				switch op {
				case 2: // wrong length
					n += int(arg%3) - 1
				case 3: // another content
					sum ^= 1
				}
				want, wantPlace, again := error(nil), true, false
				switch {
				case index >= geo.Count() || n != len(p) || k == codec.None && n != place:
					want = ErrRange
				case index >= limit():
					want = ErrCredit
				case (held[index] || copying[index]) && k == came[index] && (op == 3 || op == 10 && k == codec.LZ4):
					again = true
				case held[index] || copying[index]:
					wantPlace = false
				}
				c := new(Claim)
				v, err := b.a.Claim(c, index, n, k, sum)
				if !errors.Is(err, want) || err == nil && v != wantPlace {
					t.Fatalf("chunk %d: %v, %v; want %v, %v", index, v, err, wantPlace, want)
				}
				if err != nil || !v {
					break
				}
				if again { // damage, but for op 10
					ok, err := b.settle(c, [][]byte{p})
					if conflict := held[index] && op == 10; ok || errors.Is(err, ErrConflict) != conflict || !c.Again() {
						t.Fatalf("chunk %d came again: %v, %v; a conflict is %v", index, ok, err, conflict)
					}
					if err != nil {
						return
					}
					break
				}
				copying[index], came[index] = true, k
				views := [][]byte{p}
				if len(p) > 1 {
					cut := int(arg) % len(p)
					views = [][]byte{p[:cut], p[cut:]}
				}
				switch op {
				case 3:
					if !commit(c, views, false) {
						return // the tensor is given up
					}
				case 10:
					if k == codec.None {
						commit(c, views, true)
						break
					}
					if ok, err := b.settle(c, views); ok || !errors.Is(err, codec.ErrDecode) {
						t.Fatalf("chunk %d that does not decode: %v, %v", index, ok, err)
					}
					copying[index] = false
					b.check(func(i uint32) bool { return held[i] })
					return
				case 4, 11: // bytes flipped on the way
					if len(p) == 0 {
						commit(c, views, true)
						break
					}
					bad := bytes.Clone(p)
					bad[int(arg)%len(bad)] ^= 0x80
					if !commit(c, [][]byte{bad}, false) {
						return
					}
				case 7: // left open: others come and go meanwhile
					open = append(open, c)
				default:
					commit(c, views, true)
				}
			}
			if script[0]%12 == 8 && len(open) > 0 {
				i := int(arg) % len(open)
				commit(open[i], [][]byte{b.payload(open[i].Index())}, true)
				open = slices.Delete(open, i, i+1)
			}
			b.check(func(i uint32) bool { return held[i] })
			count, below := uint32(0), uint32(0)
			for _, h := range held {
				if h {
					count++
				}
			}
			for below < geo.Count() && held[below] {
				below++
			}
			if b.a.Limit() != limit() || b.a.Held() != count || b.a.Below() != below || b.a.Whole() != (count == geo.Count()) {
				t.Fatalf("limit %d held %d below %d whole %v; want %d %d %d", b.a.Limit(), b.a.Held(), b.a.Below(), b.a.Whole(),
					limit(), count, below)
			}
		}
	})
}

// filled claims a chunk and fills its place from what comes.
func (b *bed) filled(index uint32, comes io.Reader) (got uint32, left int, err error) {
	p := b.payload(index)
	v, err := b.a.Claim(&b.claim, index, len(p), codec.None, b.sum(index, p))
	require.NoError(b.t, err)
	require.True(b.t, v)
	return b.claim.Fill(comes)
}

func TestFillReadsAChunkToItsPlaceOverRegions(t *testing.T) {
	for _, chunk := range []int64{1, codec.PieceBytes - 1, codec.PieceBytes, codec.PieceBytes + 1, 2 * codec.PieceBytes, 2*codec.PieceBytes + 1} {
		t.Run(fmt.Sprint(chunk), func(t *testing.T) {
			b := newBed(t, 2*chunk+1, chunk)
			for _, n := range []int64{chunk / 3, chunk, chunk + 1 - chunk/3} {
				b.lend(n)
			}
			for _, index := range []uint32{2, 0, 1} {
				got, left, err := b.filled(index, iotest.HalfReader(bytes.NewReader(b.payload(index))))
				require.NoError(t, err)
				require.Zero(t, left)
				ok, err := b.a.Commit(&b.claim, got, nil)
				require.NoError(t, err)
				require.True(t, ok)
			}
			b.check(func(uint32) bool { return true })
		})
	}
}

func TestAChunkOfNothingIsFilled(t *testing.T) {
	b := newBed(t, 0, 4)
	b.lend(0)
	got, left, err := b.filled(0, bytes.NewReader(nil))
	require.NoError(t, err)
	require.Zero(t, left)
	ok, err := b.a.Commit(&b.claim, got, nil)
	require.NoError(t, err)
	require.True(t, ok)
}

func TestAnAbortedChunkIsAbsentAndWasNotDamaged(t *testing.T) {
	b := newBed(t, 12, 4)
	b.lend(12)
	for range MaxCorrupt + 1 {
		_, left, err := b.filled(1, bytes.NewReader(b.payload(1)[:3]))
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
		require.Equal(t, 1, left)
		b.a.Abort(&b.claim)
		require.False(t, b.a.Has(1))
	}
	for _, index := range []uint32{0, 1, 2} {
		ok, err := b.place(index, 0)
		require.NoError(t, err)
		require.True(t, ok)
	}
	p := b.payload(1)
	v, err := b.a.Claim(&b.claim, 1, len(p), codec.None, b.sum(1, p)^1)
	require.NoError(t, err)
	require.True(t, v)
	require.True(t, b.claim.Again())
	b.a.Abort(&b.claim)
	require.True(t, b.a.Has(1), "it stays")
	b.check(func(uint32) bool { return true })
}

func TestAnAbortedClaimReturnsTheMemoryOfADroppedTensor(t *testing.T) {
	b := newBed(t, 8, 4)
	b.lend(8)
	_, _, err := b.filled(0, bytes.NewReader(nil))
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	b.drop()
	require.Equal(t, []int{0}, b.empty)
	b.a.Abort(&b.claim)
	require.Equal(t, []int{1}, b.empty)
}

func TestHeldChunksAreThereAndTheOthersGoBetweenThem(t *testing.T) {
	b := newBed(t, 42, 4) // 11 chunks, the last of 2 bytes
	b.a.Hold(8)
	require.Equal(t, uint32(2), b.a.Below())
	b.lent = 8
	b.lend(8) // chunks 2 and 3
	b.a.Hold(12)
	require.Equal(t, uint32(7), b.a.Limit())
	for _, i := range []uint32{3, 2} {
		_, err := b.place(i, 0)
		require.NoError(t, err)
	}
	require.Equal(t, uint32(7), b.a.Below())
	require.Panics(t, func() { b.a.Hold(3) }, "within a chunk")
	require.Panics(t, func() { b.a.Hold(15) }, "past the end")
	b.a.Hold(14)
	require.True(t, b.a.Whole())
	require.Equal(t, b.payload(2), b.region(0)[:4])
	_, err := b.place(10, 0)
	require.ErrorIs(t, err, ErrConflict, "it is here")
}
