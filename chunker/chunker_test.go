package chunker

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/tensor"
)

const all = ^uint32(0)

// bed is a chunker over known bytes that counts releases.
type bed struct {
	t        testing.TB
	c        *Chunker
	geo      tensor.Geometry
	data     []byte
	releases []int // per accepted offer
	offers   []offer
}

type offer struct{ off, n int64 }

func newBed(t testing.TB, size, chunk int64) *bed {
	t.Helper()
	geo, err := tensor.NewGeometry(size, chunk)
	require.NoError(t, err)
	b := &bed{t: t, c: New(geo), geo: geo, data: make([]byte, size)}
	for i := range b.data {
		b.data[i] = byte(i*7 + i>>8)
	}
	return b
}

// offer offers a copy of the tensor's own bytes, so that each region has memory
// of its own and a view across two of them cannot pass for one.
func (b *bed) offer(off, n int64) error {
	i := len(b.releases)
	b.releases = append(b.releases, 0)
	b.offers = append(b.offers, offer{off, n})
	err := b.c.Offer(off, bytes.Clone(b.data[off:off+n]), func() { b.releases[i]++ })
	if err != nil || n == 0 && b.geo.Size > 0 { // not kept
		want := 0
		if err == nil {
			want = 1
		}
		require.Equal(b.t, want, b.releases[i])
		b.releases, b.offers = b.releases[:i], b.offers[:i]
	}
	return err
}

func (b *bed) mustOffer(off, n int64) {
	b.t.Helper()
	require.NoError(b.t, b.offer(off, n))
}

// take takes the chunk that must come next, and checks its bytes.
func (b *bed) take(index uint32) Releaser {
	b.t.Helper()
	got, ok := b.c.Take(all)
	require.True(b.t, ok)
	require.Equal(b.t, index, got)
	return b.view(index)
}

func (b *bed) view(index uint32) Releaser {
	b.t.Helper()
	views, r := b.c.View(index, nil)
	off, n := b.geo.Span(index)
	require.Equal(b.t, b.data[off:off+n], append([]byte{}, slices.Concat(views...)...))
	return r
}

func (b *bed) ack(below uint32, beyond ...uint32) error {
	_, err := b.c.Ack(below, beyond)
	return err
}

// lose makes every chunk wait again that was taken and is not acknowledged.
func (b *bed) lose() {
	for i := range b.geo.Count() {
		b.c.Lose(i)
	}
}

func (b *bed) released(want ...int) {
	b.t.Helper()
	require.Equal(b.t, want, b.releases)
}

func TestMemoryOfferedInAnyOrderAndCutComesOutAsChunks(t *testing.T) {
	for _, chunk := range []int64{1, 2, 7, 1024, 1025, 16383, 16384, 16385} {
		for _, size := range []int64{0, 1, chunk - 1, chunk, chunk + 1, 2 * chunk, 2*chunk + 1} {
			for name, step := range map[string]int64{
				"whole": size, "chunk by chunk": chunk, "straddling": chunk + chunk/2 + 1, "third": chunk/3 + 1, "two chunks": 2 * chunk,
			} {
				t.Run(fmt.Sprintf("chunk=%d/size=%d/%s", chunk, size, name), func(t *testing.T) {
					for trial := range uint64(4) {
						b := newBed(t, size, chunk)
						var starts []int64
						for off := int64(0); off < size; off += step {
							starts = append(starts, off)
						}
						if size == 0 {
							starts = []int64{0}
						}
						if trial > 0 {
							rand.New(rand.NewPCG(trial, 0)).Shuffle(len(starts), func(i, j int) { starts[i], starts[j] = starts[j], starts[i] })
						}
						var taken []uint32
						for _, off := range starts {
							require.False(t, b.c.Offered())
							b.mustOffer(off, min(step, size-off))
							for {
								i, ok := b.c.Take(all)
								if !ok {
									break
								}
								taken = append(taken, i)
								b.view(i).Release()
							}
						}
						require.True(t, b.c.Offered())
						require.True(t, b.c.Sent())
						slices.Sort(taken)
						require.Len(t, taken, int(b.geo.Count()))
						require.Len(t, slices.Compact(taken), int(b.geo.Count()), "a chunk came twice")
						for _, n := range b.releases {
							require.Zero(t, n, "released before it was acknowledged")
						}
						require.NoError(t, b.ack(b.geo.Count()))
						require.True(t, b.c.Acked())
						for _, n := range b.releases {
							require.Equal(t, 1, n)
						}
					}
				})
			}
		}
	}
}

// A chunk whose last part is offered alone is complete: no byte of another chunk
// has to come with it.
func TestAChunkOfManySmallRegionsIsReadyWithItsLast(t *testing.T) {
	b := newBed(t, 12, 8)
	for off := range int64(8) {
		require.False(t, b.c.Ready(all))
		b.mustOffer(off, 1)
	}
	b.take(0).Release()
	b.mustOffer(10, 2)
	require.False(t, b.c.Ready(all))
	b.mustOffer(8, 2)
	b.take(1).Release()
	require.True(t, b.c.Sent())
}

func TestMemoryOutsideTheTensorOrOfferedTwiceIsRefused(t *testing.T) {
	for name, tc := range map[string]struct {
		off int64
		n   int
	}{
		"before the start":       {-1, 1},
		"one past the end":       {20, 1},
		"across the end":         {19, 2},
		"larger than the tensor": {0, 21},
		"offset near 2^63":       {1<<63 - 1, 1},
		"the same again":         {4, 4},
		"its first byte":         {4, 1},
		"its last byte":          {7, 1},
		"across its start":       {3, 2},
		"across its end":         {7, 2},
		"around it":              {3, 6},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, 20, 4)
			b.mustOffer(4, 4)
			b.mustOffer(12, 4)
			require.ErrorIs(t, b.c.Offer(tc.off, make([]byte, tc.n), func() { t.Error("released after a refusal") }), ErrOffer)
			b.take(1).Release()
			b.take(3).Release()
			require.False(t, b.c.Ready(all))
		})
	}
	t.Run("what was acknowledged", func(t *testing.T) {
		b := newBed(t, 8, 4)
		b.mustOffer(0, 4)
		b.take(0).Release()
		require.NoError(t, b.ack(1))
		b.released(1)
		require.ErrorIs(t, b.offer(0, 4), ErrOffer)
		require.ErrorIs(t, b.offer(3, 2), ErrOffer)
		b.mustOffer(4, 4)
	})
	t.Run("an empty tensor twice", func(t *testing.T) {
		b := newBed(t, 0, 4)
		b.mustOffer(0, 0)
		require.ErrorIs(t, b.offer(0, 0), ErrOffer)
		b.take(0).Release()
		require.False(t, b.c.Ready(all))
		require.NoError(t, b.ack(1))
		require.ErrorIs(t, b.offer(0, 0), ErrOffer)
		b.released(1)
	})
	t.Run("after Close", func(t *testing.T) {
		b := newBed(t, 8, 4)
		b.c.Close()
		require.ErrorIs(t, b.offer(0, 4), ErrOffer)
	})
}

func TestEmptyMemoryIsGivenBackAtOnce(t *testing.T) {
	b := newBed(t, 8, 4)
	n := 0
	require.NoError(t, b.c.Offer(3, nil, func() { n++ }))
	require.NoError(t, b.c.Offer(8, nil, nil))
	require.Equal(t, 1, n)
	require.False(t, b.c.Ready(all))
	require.False(t, b.c.Offered())
}

func TestTakeKeepsBelowTheLimitAndAscends(t *testing.T) {
	b := newBed(t, 40, 4)
	b.mustOffer(20, 20)
	require.False(t, b.c.Ready(5))
	_, ok := b.c.Take(5)
	require.False(t, ok)
	require.True(t, b.c.Ready(6))
	i, ok := b.c.Take(6)
	require.True(t, ok)
	require.EqualValues(t, 5, i)
	b.mustOffer(0, 20)
	for _, want := range []uint32{0, 1, 2, 3, 4, 6, 7, 8, 9} {
		b.take(want).Release()
	}
	require.True(t, b.c.Sent())
}

func TestResendsGoFirstAndOnlyWhatWasSent(t *testing.T) {
	b := newBed(t, 40, 4)
	b.mustOffer(0, 20)
	b.mustOffer(32, 8)
	for _, want := range []uint32{0, 1, 2, 3} {
		b.take(want).Release()
	}
	require.NoError(t, b.ack(1))
	for _, i := range []uint32{3, 1, 3, 0 /* acknowledged */, 4 /* waits */, 5 /* not offered */, 8 /* waits */, 10, all} {
		require.NoError(t, b.c.Resend(i))
	}
	for _, want := range []uint32{1, 3, 4, 8, 9} {
		require.False(t, b.c.Sent())
		b.take(want).Release()
	}
	require.False(t, b.c.Ready(all))
	require.NoError(t, b.c.Resend(9)) // sent, though there is a gap below
	require.NoError(t, b.c.Resend(2))
	require.NoError(t, b.ack(3)) // crosses the second
	b.take(9).Release()
	require.False(t, b.c.Ready(all))
	b.mustOffer(20, 12)
	for _, want := range []uint32{5, 6, 7} {
		b.take(want).Release()
	}
	require.NoError(t, b.ack(10))
	b.released(1, 1, 1)
}

func TestResendsAreBounded(t *testing.T) {
	b := newBed(t, MaxResends+1, 1)
	b.mustOffer(0, MaxResends+1)
	for i := range uint32(MaxResends + 1) {
		b.take(i).Release()
	}
	for i := range uint32(MaxResends) {
		require.NoError(t, b.c.Resend(MaxResends-i))
	}
	require.NoError(t, b.c.Resend(1), "it waits already")
	require.ErrorIs(t, b.c.Resend(0), ErrAck)
	b.take(1).Release()
	require.NoError(t, b.c.Resend(0))
}

func TestAnAckOfWhatWasNotSentIsRefused(t *testing.T) {
	b := newBed(t, 20, 4)
	require.ErrorIs(t, b.ack(1), ErrAck)
	b.mustOffer(0, 4)
	b.mustOffer(8, 12)
	require.ErrorIs(t, b.ack(1), ErrAck)
	b.take(0).Release()
	b.take(2).Release()
	require.ErrorIs(t, b.ack(2), ErrAck)
	require.ErrorIs(t, b.ack(3), ErrAck)
	require.ErrorIs(t, b.ack(all), ErrAck)
	require.True(t, b.c.Unacked())
	require.NoError(t, b.ack(1))
	require.NoError(t, b.ack(0), "an old one is nothing new")
	require.EqualValues(t, 1, b.c.Below())
	b.released(1, 0)
}

func TestAckSentDropsWhatWasSentWithoutAGap(t *testing.T) {
	b := newBed(t, 20, 4)
	b.mustOffer(0, 8)
	b.mustOffer(12, 8)
	b.c.AckSent()
	require.Zero(t, b.c.Below())
	for _, i := range []uint32{0, 1, 3} {
		b.take(i).Release()
	}
	require.NoError(t, b.c.Resend(1))
	b.c.AckSent()
	require.EqualValues(t, 1, b.c.Below(), "who asks again still reads")
	b.take(1).Release()
	b.c.AckSent()
	b.released(1, 0)
	require.EqualValues(t, 2, b.c.Below())
	b.take(4).Release()
	b.mustOffer(8, 4)
	b.take(2).Release()
	b.c.AckSent()
	b.released(1, 1, 1)
	require.True(t, b.c.Acked())
}

func TestWhatIsLostAndNotAcknowledgedIsSentAgain(t *testing.T) {
	b := newBed(t, 40, 4)
	b.mustOffer(0, 12)
	b.mustOffer(20, 8)
	b.lose() // of nothing
	for _, i := range []uint32{0, 1, 2, 5} {
		b.take(i).Release()
	}
	require.NoError(t, b.ack(1))
	require.NoError(t, b.c.Resend(2))
	b.mustOffer(12, 4)
	b.lose()
	require.ErrorIs(t, b.ack(4), ErrAck, "3 was never sent")
	for _, i := range []uint32{1, 2, 5, 3, 6} { // those of the past first
		b.take(i).Release()
	}
	b.lose()
	require.NoError(t, b.c.Resend(2), "it waits already")
	require.NoError(t, b.ack(3), "what was sent once may be acknowledged")
	require.False(t, b.c.Sent())
	for _, i := range []uint32{3, 5, 6} {
		b.take(i).Release()
	}
	_, ok := b.c.Take(all)
	require.False(t, ok)
	require.NoError(t, b.ack(4))
	b.c.Close()
	b.lose()
	require.False(t, b.c.Ready(all))
}

func TestWhatIsAcknowledgedBehindAGapIsReleased(t *testing.T) {
	b := newBed(t, 40, 4) // 10 chunks
	for off := int64(0); off < 40; off += 8 {
		b.mustOffer(off, 8) // two chunks each
	}
	for i := range uint32(8) {
		b.take(i).Release()
	}
	news, err := b.c.Ack(1, []uint32{3, 5, 6, 7})
	require.NoError(t, err)
	require.True(t, news)
	b.released(0, 0, 0, 0, 0) // each has a chunk that is missing
	news, err = b.c.Ack(1, []uint32{3, 4})
	require.NoError(t, err)
	require.False(t, news)
	require.NoError(t, b.ack(1, 3, 8))
	b.released(0, 0, 1, 1, 0)
	require.EqualValues(t, 1, b.c.Below())
	require.True(t, b.c.Unacked())
	require.ErrorIs(t, b.ack(1, 7, 9), ErrAck, "8 was never sent")
	require.ErrorIs(t, b.c.Offer(16, make([]byte, 8), nil), ErrOffer, "that was offered before")
	require.False(t, b.c.Lose(4), "it is acknowledged")
	require.True(t, b.c.Lose(2))
	require.False(t, b.c.Lose(2), "it waits already")
	b.take(2).Release()
	require.NoError(t, b.ack(3))
	b.released(1, 1, 1, 1, 0)
	require.EqualValues(t, 8, b.c.Below())
	b.take(8).Release()
	b.take(9).Release()
	require.NoError(t, b.ack(10))
	require.True(t, b.c.Acked())
}

func TestARegionStaysUntilItsLastChunkIsAcknowledged(t *testing.T) {
	b := newBed(t, 20, 8)
	for off := int64(0); off < 20; off += 5 { // chunks 0: regions 0, 1; 1: 1, 2, 3; 2: 3
		b.mustOffer(off, 5)
	}
	r0, r1 := b.take(0), b.take(1)
	b.take(2).Release()
	require.NoError(t, b.ack(1))
	b.released(0, 0, 0, 0)
	r0.Release()
	b.released(1, 0, 0, 0)
	require.NoError(t, b.ack(2))
	b.released(1, 0, 0, 0)
	r1.Release()
	b.released(1, 1, 1, 0)
	require.NoError(t, b.ack(3))
	b.released(1, 1, 1, 1)
}

func TestCloseLeavesViewsThatAreOut(t *testing.T) {
	b := newBed(t, 16, 4)
	b.mustOffer(0, 6)
	b.mustOffer(6, 10)
	b.take(0).Release()
	out := b.take(1) // across both
	views, again := b.c.View(2, nil)
	b.c.Close()
	b.c.Close()
	b.released(0, 0)
	require.NoError(t, b.c.Resend(0))
	require.NoError(t, b.ack(1))
	require.False(t, b.c.Ready(all))
	out.Release()
	b.released(1, 0)
	require.Equal(t, b.data[8:12], views[0])
	again.Release()
	b.released(1, 1)
}

func TestReleasingTwiceIsAPanic(t *testing.T) {
	r := new(region)
	r.refs.Store(1)
	r.refs.Add(-1)
	require.PanicsWithValue(t, "chunker: region released more often than retained", r.Release)
}

// Views are let go by gRPC's goroutines while the chunker goes on; -race watches.
func TestViewsAreReleasedFromAnyGoroutine(t *testing.T) {
	const size, chunk, step = 1 << 16, 64, 1000
	data := make([]byte, size)
	geo := tensor.Geometry{Size: size, ChunkBytes: chunk}
	c := New(geo)
	var mu sync.Mutex
	releases := map[int64]int{}
	var wait sync.WaitGroup
	for off := int64(0); off < size; off += step {
		n := min(step, size-off)
		require.NoError(t, c.Offer(off, data[off:off+n], func() {
			mu.Lock()
			defer mu.Unlock()
			releases[off]++
		}))
		for {
			i, ok := c.Take(all)
			if !ok {
				break
			}
			_, r := c.View(i, nil)
			wait.Go(r.Release)
			if i%16 == 15 {
				_, err := c.Ack(i, nil)
				require.NoError(t, err)
			}
		}
	}
	c.Close()
	wait.Wait()
	require.Len(t, releases, (size+step-1)/step)
	for off, n := range releases {
		require.Equal(t, 1, n, "region at %d", off)
	}
}

func TestAReadyChunkAllocatesNothing(t *testing.T) {
	const chunk, chunks = 64, 4096
	c := New(tensor.Geometry{Size: chunk * chunks, ChunkBytes: chunk})
	require.NoError(t, c.Offer(0, make([]byte, chunk*chunks), nil))
	views := make([][]byte, 0, 4)
	if n := testing.AllocsPerRun(4000, func() {
		i, ok := c.Take(all)
		if !ok {
			t.Fatal("nothing to take")
		}
		v, r := c.View(i, views[:0])
		if len(v) != 1 {
			t.Fatal("not one view")
		}
		r.Release()
		if i > 0 {
			if err := c.Resend(i - 1); err != nil {
				t.Fatal(err)
			}
			if again, ok := c.Take(all); !ok || again != i-1 {
				t.Fatal("not sent again")
			}
			if _, err := c.Ack(i-1, nil); err != nil {
				t.Fatal(err)
			}
		}
	}); n != 0 {
		t.Errorf("%v allocations per chunk, want 0", n)
	}
}

// FuzzChunker runs a script against a chunker and a model that keeps, per byte,
// who offered it, and per chunk how often it waits.
func FuzzChunker(f *testing.F) {
	f.Add(uint16(10), uint16(4), []byte{0, 0, 10, 1, 9, 0, 2, 0, 0, 1, 9, 0, 4, 1, 0})
	f.Add(uint16(0), uint16(1), []byte{0, 0, 0, 1, 5, 0, 2, 0, 0, 4, 1, 0})
	f.Add(uint16(32), uint16(8), []byte{0, 8, 4, 0, 12, 4, 1, 9, 0, 0, 0, 8, 1, 9, 0, 3, 0, 0, 1, 9, 0, 4, 2, 0, 5, 0, 0, 2, 0, 0})
	f.Add(uint16(9), uint16(3), []byte{0, 0, 1, 0, 1, 1, 0, 2, 1, 1, 9, 0, 0, 3, 6, 1, 2, 0, 1, 9, 0, 4, 1, 0, 2, 1, 0, 2, 0, 0})
	f.Add(uint16(32), uint16(8), []byte{0, 0, 32, 1, 9, 0, 1, 9, 0, 1, 9, 0, 4, 1, 0, 3, 1, 0, 6, 0, 0, 4, 2, 0, 1, 9, 0, 1, 9, 0, 4, 4, 0})
	f.Add(uint16(32), uint16(4), []byte{0, 0, 32, 1, 9, 0, 1, 9, 0, 1, 9, 0, 1, 9, 0, 4, 0, 1, 4, 1, 64, 6, 3, 0, 1, 9, 0, 4, 4, 0})
	f.Fuzz(func(t *testing.T, size, chunk uint16, script []byte) {
		geo, err := tensor.NewGeometry(int64(size%512), int64(chunk%128))
		if err != nil || geo.Count() > 64 || len(script) > 300 {
			return // longer ones find nothing that shorter ones do not
		}
		type out struct {
			r       Releaser
			regions []int // offers it lies in
		}
		var (
			b       = newBed(t, geo.Size, geo.ChunkBytes)
			owner   = make([]int, geo.Size)     // offer that a byte belongs to, plus 1
			taken   = make([]bool, geo.Count()) // at least once
			again   = make([]bool, geo.Count())
			acked   = make([]bool, geo.Count())
			outs    []out
			closed  bool
			pending = func(i uint32) bool { // waits to be taken
				if closed || i >= geo.Count() || taken[i] && !again[i] {
					return false
				}
				if again[i] {
					return true
				}
				off, n := geo.Span(i)
				return geo.Size == 0 && len(b.offers) > 0 || n > 0 && !slices.Contains(owner[off:off+n], 0)
			}
		)
		for ; len(script) >= 3; script = script[3:] {
			x, y := int64(script[1]), int64(script[2])
			switch script[0] % 7 {
			case 0: // offer
				off := min(x*2, geo.Size)
				n := min(y, geo.Size-off)
				want := !closed
				if n == 0 && geo.Size == 0 {
					want = want && len(b.offers) == 0
				}
				for _, o := range owner[off : off+n] {
					want = want && o == 0
				}
				err := b.offer(off, n)
				if (err == nil) != want {
					t.Fatalf("offer [%d,+%d): %v, want ok %v", off, n, err, want)
				}
				if err == nil {
					for i := off; i < off+n; i++ {
						owner[i] = len(b.offers)
					}
				}
			case 1: // take
				limit := uint32(x)
				want := all
				for _, first := range []bool{true, false} { // those to be sent again go first
					for i := range min(limit, geo.Count()) {
						if want == all && pending(i) && again[i] == first {
							want = i
						}
					}
				}
				if b.c.Ready(limit) != (want != all) {
					t.Fatalf("ready below %d: %v, want chunk %d", limit, b.c.Ready(limit), want)
				}
				got, ok := b.c.Take(limit)
				if ok != (want != all) || ok && got != want {
					t.Fatalf("took %d, %v below %d; want %d", got, ok, limit, want)
				}
				if !ok {
					break
				}
				taken[got], again[got] = true, false
				o := out{r: b.view(got)}
				off, n := geo.Span(got)
				for _, w := range owner[off : off+n] {
					if !slices.Contains(o.regions, w-1) {
						o.regions = append(o.regions, w-1)
					}
				}
				if n == 0 {
					o.regions = []int{0}
				}
				outs = append(outs, o)
			case 2: // let a view go
				if len(outs) > 0 {
					i := int(x) % len(outs)
					outs[i].r.Release()
					outs = slices.Delete(outs, i, i+1)
				}
			case 6: // lose
				i := uint32(x)
				if want := !closed && i < geo.Count() && !acked[i] && taken[i] && !again[i]; b.c.Lose(i) != want {
					t.Fatalf("chunk %d was lost: want %v", i, want)
				} else if want {
					again[i] = true
				}
			case 3: // resend
				i := uint32(x)
				if err := b.c.Resend(i); err != nil {
					t.Fatal(err)
				}
				if !closed && i < geo.Count() && !acked[i] && taken[i] {
					again[i] = true
				}
			case 4: // ack
				to := uint32(x)
				sent := uint32(0)
				for sent < geo.Count() && taken[sent] {
					sent++
				}
				var beyond []uint32
				held := slices.Clone(acked)
				for i := range held[:min(to, sent)] {
					held[i] = true
				}
				want := to <= sent
				if lo, hi := to+1+uint32(y)%8, to+2+uint32(y)%8+uint32(y)/64; y > 0 && hi <= geo.Count() { // a range, too
					beyond = []uint32{lo, hi}
					for i := lo; i < hi; i++ {
						want = want && taken[i]
						held[i] = true
					}
				}
				news, err := b.c.Ack(to, beyond)
				if (err == nil) != want {
					t.Fatalf("ack below %d and %v: %v; taken %v", to, beyond, err, taken)
				}
				if err == nil && !closed {
					if news == slices.Equal(acked, held) {
						t.Fatalf("ack below %d and %v: news %v, before %v", to, beyond, news, acked)
					}
					acked = held
					for i := range again {
						again[i] = again[i] && !acked[i]
					}
				}
			case 5:
				if x%8 == 0 {
					b.c.Close()
					closed = true
				}
			}
			for i, o := range b.offers {
				first, last := uint32(o.off/geo.ChunkBytes), uint32(max(o.off+o.n-1, 0)/geo.ChunkBytes)
				want := 1
				if !closed && slices.Contains(acked[first:last+1], false) {
					want = 0
				}
				for _, v := range outs {
					if slices.Contains(v.regions, i) {
						want = 0
					}
				}
				if b.releases[i] != want {
					t.Fatalf("offer %d of chunks %d to %d was released %d times, want %d", i, first, last, b.releases[i], want)
				}
			}
			if closed {
				continue
			}
			waits := false
			for i := range geo.Count() {
				waits = waits || pending(i)
			}
			offered := len(b.offers) > 0 && !slices.Contains(owner, 0)
			if b.c.Offered() != offered || b.c.Sent() != (offered && !waits) || b.c.Acked() == slices.Contains(acked, false) {
				t.Fatalf("offered %v sent %v acked %v; want %v %v %v", b.c.Offered(), b.c.Sent(), b.c.Acked(), offered, offered && !waits, !slices.Contains(acked, false))
			}
		}
		b.c.Close()
		for _, o := range outs {
			o.r.Release()
		}
		for i, n := range b.releases {
			if n != 1 {
				t.Fatalf("offer %d was released %d times in the end", i, n)
			}
		}
	})
}

func TestSkippedChunksAreNeitherTakenNorSentAgain(t *testing.T) {
	b := newBed(t, 44, 4) // 11 chunks
	b.c.Skip(0, 2)
	b.mustOffer(8, 12) // 2 to 4
	b.c.Skip(5, 8)
	require.False(t, b.c.Offered())
	for _, i := range []uint32{2, 3, 4} {
		b.take(i).Release()
	}
	require.NoError(t, b.ack(8), "skipped ones count as sent")
	b.released(1)
	b.mustOffer(32, 4) // 8
	b.c.Skip(9, 11)
	require.True(t, b.c.Offered())
	require.NoError(t, b.c.Resend(9))
	require.NoError(t, b.c.Resend(6))
	b.take(8).Release()
	require.True(t, b.c.Sent())
	b.lose()
	b.take(8).Release()
	require.False(t, b.c.Ready(all))
	require.NoError(t, b.ack(11))
	require.True(t, b.c.Acked())
	b.released(1, 1)
}

func TestATensorOfWhichAllIsSkippedIsSentAtOnce(t *testing.T) {
	b := newBed(t, 10, 4)
	b.c.Skip(0, 3)
	require.True(t, b.c.Sent())
	b.lose()
	require.False(t, b.c.Ready(all))
	require.NoError(t, b.ack(3))
}

func TestAResendOfTheLargestIndexIsIgnored(t *testing.T) {
	geo, err := tensor.NewGeometry(4, 1)
	require.NoError(t, err)
	c := New(geo)
	require.NoError(t, c.Offer(0, make([]byte, 4), nil))
	for range 4 {
		_, ok := c.Take(4)
		require.True(t, ok)
	}
	require.True(t, c.Sent())
	require.NoError(t, c.Resend(1<<32-1))
	require.Empty(t, c.again)
	require.True(t, c.Sent())
}
