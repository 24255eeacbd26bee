package assembler

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

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
	reports []int    // how often each region was reported full
	claim   Claim
}

const (
	edge   = "\xC9canary\x9C"
	margin = len(edge)
	blank  = 0x55
)

func newBed(t testing.TB, size, chunk int64) *bed {
	t.Helper()
	geo, err := tensor.NewGeometry(size, chunk)
	require.NoError(t, err)
	b := &bed{t: t, a: New(id, geo, codec.CRC32C), geo: geo, data: make([]byte, size)}
	r := rand.New(rand.NewPCG(uint64(size), uint64(chunk)))
	for i := range b.data {
		b.data[i] = byte(r.Uint32())
	}
	return b
}

func (b *bed) lend(n int64) {
	b.t.Helper()
	mem := slices.Concat([]byte(edge), bytes.Repeat([]byte{blank}, int(n)), []byte(edge))
	b.backing = append(b.backing, mem)
	b.reports = append(b.reports, 0)
	require.Equal(b.t, len(b.backing)-1, b.a.Lend(mem[margin:margin+int(n):margin+int(n)]))
	b.collect()
}

func (b *bed) region(i int) []byte { return b.backing[i][margin : len(b.backing[i])-margin] }

func (b *bed) collect() {
	b.a.TakeFull(func(i int) { b.reports[i]++ })
}

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
func (b *bed) place(index uint32, piece int) (Verdict, error) {
	p := b.payload(index)
	v, err := b.a.Claim(&b.claim, index, len(p), codec.None, b.sum(index, p))
	if err != nil || v != Place {
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
	b.collect()
	return v, err
}

// check compares everything with the obvious: a region is reported once and only
// when every byte of it is right, and no canary has moved.
func (b *bed) check(held func(uint32) bool) {
	b.t.Helper()
	off := int64(0)
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
		want := 0
		if full {
			want = 1
		}
		if b.reports[i] != want {
			b.t.Fatalf("region %d at %d of %d bytes was reported full %d times, want %d", i, off, n, b.reports[i], want)
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
							require.Equal(t, Place, v)
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
		require.Equal(t, step.limit, b.a.Limit(), "after %d bytes", b.a.Lent())
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
	require.Panics(t, func() { b.a.Lend(make([]byte, 4)) })
	b.lend(3)
	require.Panics(t, func() { b.a.Lend(make([]byte, 1)) })
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
	require.Equal(t, Place, v)

	// While it is being copied.
	var second Claim
	v, err = b.a.Claim(&second, 0, 4, codec.None, sum)
	require.NoError(t, err)
	require.Equal(t, Duplicate, v)
	_, err = b.a.Claim(&second, 0, 4, codec.None, sum+1)
	require.ErrorIs(t, err, ErrConflict)

	// And once it is held.
	ok, err := b.settle(&b.claim, [][]byte{p})
	require.NoError(t, err)
	require.True(t, ok)
	v, err = b.a.Claim(&second, 0, 4, codec.None, sum)
	require.NoError(t, err)
	require.Equal(t, Duplicate, v)
	_, err = b.a.Claim(&second, 0, 4, codec.None, sum+1)
	require.ErrorIs(t, err, ErrConflict)
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
		require.Equal(t, Place, v)
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
			require.Equal(t, Place, v)
			ok, err := b.settle(&b.claim, views)
			require.NoError(t, err)
			require.True(t, ok, "split %b", mask)
			b.collect()
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
	b.collect()
	b.check(func(uint32) bool { return true })
}

func TestSteadyStateAllocatesNothing(t *testing.T) {
	const chunk, chunks = 256, 4096
	b := newBed(t, chunk*chunks, chunk)
	views := make([][]byte, 1)
	mem := make([]byte, chunk*chunks)
	const step = 1000 // bytes per region: chunks straddle
	for off := 0; off < len(mem); off += step {
		b.a.Lend(mem[off:min(off+step, len(mem))])
	}
	full := 0
	count := func(int) { full++ }
	index := uint32(0)
	one := func() {
		p := b.payload(index)
		v, err := b.a.Claim(&b.claim, index, chunk, codec.None, b.sum(index, p))
		if err != nil || v != Place {
			t.Fatal(v, err)
		}
		views[0] = p
		if ok, err := b.settle(&b.claim, views); err != nil || !ok {
			t.Fatal(ok, err)
		}
		b.a.TakeFull(count)
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

// FuzzAssembler runs a script against an assembler and a model that keeps one
// flag per chunk. A script byte pair is an operation and its argument.
func FuzzAssembler(f *testing.F) {
	f.Add(uint16(10), uint16(4), []byte{0, 10, 1, 0, 1, 1, 1, 2})
	f.Add(uint16(0), uint16(1), []byte{1, 0, 0, 0, 1, 0, 0, 0})
	f.Add(uint16(33), uint16(8), []byte{0, 3, 0, 9, 1, 0, 2, 0, 3, 0, 0, 30, 1, 4, 4, 3, 5, 2})
	f.Add(uint16(20), uint16(3), []byte{0, 20, 4, 1, 4, 1, 4, 1})
	f.Add(uint16(64), uint16(16), []byte{0, 64, 7, 0, 7, 1, 8, 1, 8, 0, 7, 3, 7, 2, 8, 0, 8, 0})
	f.Fuzz(func(t *testing.T, size, chunk uint16, script []byte) {
		geo, err := tensor.NewGeometry(int64(size%512), int64(chunk%128))
		if err != nil || geo.Count() > 64 || len(script) > 256 {
			return // longer ones find nothing that shorter ones do not
		}
		b := newBed(t, geo.Size, geo.ChunkBytes)
		var (
			held    = make([]bool, geo.Count())
			copying = make([]bool, geo.Count())
			corrupt = make([]int, geo.Count())
			lent    int64
			open    []*Claim
		)
		limit := func() uint32 { // slow and obvious
			if len(b.backing) == 0 {
				return 0
			}
			n := uint32(0)
			for n < geo.Count() {
				if off, length := geo.Span(n); off+length > lent {
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
			b.collect()
			if !good {
				corrupt[i]++
			}
			if wantErr := !good && corrupt[i] == MaxCorrupt; errors.Is(err, ErrCorrupt) != wantErr || ok != good {
				t.Fatalf("chunk %d committed with %v, %v; good is %v, corrupt %d times", i, ok, err, good, corrupt[i])
			}
			held[i] = held[i] || good
			return err == nil
		}
		for ; len(script) >= 2; script = script[2:] {
			arg := script[1]
			index := uint32(arg) % (geo.Count() + 1) // one too many, too
			switch op := script[0] % 9; op {
			case 0:
				n := min(int64(arg), geo.Size-lent)
				lent += n
				b.lend(n)
			default:
				var p []byte
				if index < geo.Count() {
					p = b.payload(index)
				}
				n, sum := len(p), b.sum(index, p)
				switch op {
				case 2: // wrong length
					n += int(arg%3) - 1
				case 3: // another content
					sum ^= 1
				}
				want, wantVerdict := error(nil), Place
				switch {
				case index >= geo.Count() || n != len(p):
					want = ErrRange
				case index >= limit():
					want = ErrCredit
				case (held[index] || copying[index]) && op == 3:
					want = ErrConflict
				case held[index] || copying[index]:
					wantVerdict = Duplicate
				}
				c := new(Claim)
				v, err := b.a.Claim(c, index, n, codec.None, sum)
				if !errors.Is(err, want) || err == nil && v != wantVerdict {
					t.Fatalf("chunk %d: %v, %v; want %v, %v", index, v, err, wantVerdict, want)
				}
				if err != nil || v != Place {
					break
				}
				copying[index] = true
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
				case 4: // bytes flipped on the way
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
			if script[0]%9 == 8 && len(open) > 0 {
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
			if b.a.Limit() != limit() || b.a.Lent() != lent || b.a.Held() != count || b.a.Below() != below || b.a.Whole() != (count == geo.Count()) {
				t.Fatalf("limit %d lent %d held %d below %d whole %v; want %d %d %d %d", b.a.Limit(), b.a.Lent(), b.a.Held(), b.a.Below(), b.a.Whole(),
					limit(), lent, count, below)
			}
		}
	})
}
