package slab

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/tensorferry/tensorferry/internal/invariants"
)

const (
	kib = 1 << 10
	mib = 1 << 20
)

func TestSizeClassHoldsWhatWasAskedAndIsItsOwnClass(t *testing.T) {
	for n, want := range map[int64]int64{
		0: 4 * kib, 1: 4 * kib, 4*kib - 1: 4 * kib, 4 * kib: 4 * kib, 4*kib + 1: 8 * kib,
		16*kib - 1: 16 * kib, 16 * kib: 16 * kib, 16*kib + 1: 20 * kib,
		64 * kib: 64 * kib, 64*kib + 1: 128 * kib,
		mib: mib, hugePage: hugePage, hugePage + 1: 2 * hugePage, 256 * mib: 256 * mib,
	} {
		if got := SizeOf(n); got != want {
			t.Errorf("SizeOf(%d) = %d, want %d", n, got, want)
		}
		if again := SizeOf(want); again != want {
			t.Errorf("SizeOf(%d) = %d: a class must hold itself", want, again)
		}
	}
}

func TestGetHandsOverExactlyTheBytesAsked(t *testing.T) {
	p := NewPool(mib, System)
	for _, n := range []int{0, 1, 1024, 1025, 16383, 16384, 16385, mapFrom - 1, mapFrom, mapFrom + 1, 2*mib + 1} {
		s := get(t, p, n)
		b := s.Bytes()
		if len(b) != n || cap(b) != n {
			t.Errorf("asked %d bytes, got length %d and capacity %d", n, len(b), cap(b))
		}
		for i := range b {
			b[i] = byte(i) // every byte can be written
		}
		s.Release()
	}
	if slabs, bytes := p.Live(); slabs != 0 || bytes != 0 {
		t.Errorf("%d slabs, %d bytes are live after the last release", slabs, bytes)
	}
}

func TestGetOfANegativeSizePanics(t *testing.T) {
	wantPanic(t, "slab: a slab of -1 bytes", func() { get(t, NewPool(0, System), -1) })
}

func TestASlabLivesUntilItsLastRelease(t *testing.T) {
	p := NewPool(mib, System)
	s := get(t, p, 100)
	s.Retain()
	s.Release()
	if slabs, bytes := p.Live(); slabs != 1 || bytes != 4*kib {
		t.Errorf("%d slabs, %d bytes are live, want one of 4096", slabs, bytes)
	}
	copy(s.Bytes(), "still mine")
	if other := get(t, p, 100); other == s {
		t.Error("a slab with a reference left was handed out again")
	}
	s.Release()
	if again := get(t, p, 100); again != s {
		t.Error("a released slab was not handed out again")
	}
}

func TestOneReleaseTooManyPanics(t *testing.T) {
	s := get(t, NewPool(mib, System), 1)
	s.Release()
	wantPanic(t, "slab: released more often than retained", s.Release)
}

func TestRetainOfAReleasedSlabPanics(t *testing.T) {
	s := get(t, NewPool(mib, System), 1)
	s.Release()
	wantPanic(t, "slab: retain of a released slab", s.Retain)
}

func TestAReusedSlabHasTheSizeOfItsNewTaker(t *testing.T) {
	p := NewPool(mib, System)
	first := get(t, p, 5000)
	first.Release()
	second := get(t, p, 8192)
	if second != first {
		t.Fatal("two sizes of one class do not share a slab")
	}
	if n := len(second.Bytes()); n != 8192 {
		t.Errorf("the slab shows %d bytes, want 8192", n)
	}
	second.Release()
	if get(t, p, 8193) == second {
		t.Error("a slab was handed out for more than it holds")
	}
}

func TestTheCacheNeverHoldsMoreThanItsLimit(t *testing.T) {
	for _, limit := range []int64{0, 4*kib - 1, 4 * kib, 100 * kib, mib} {
		p := NewPool(limit, System)
		var taken []*Slab
		for _, n := range []int{1, 4 * kib, 64 * kib, 1, 64*kib + 1, mib, mib + 1, 8 * kib} {
			taken = append(taken, get(t, p, n))
		}
		for _, s := range taken {
			s.Release()
			var sum int64
			for class, list := range p.cache.free {
				sum += int64(class * len(list))
			}
			if sum != p.Kept() || sum > limit {
				t.Errorf("limit %d: %d bytes cached, counted as %d", limit, sum, p.Kept())
			}
		}
	}
}

func TestTheCacheGivesWayToWhatIsHandedOut(t *testing.T) {
	const limit = 256 * kib
	p := NewPool(limit, System)
	for _, n := range []int{4 * kib, 64 * kib, 4 * kib, 128 * kib, 20 * kib, 256 * kib, 4 * kib, 64 * kib} {
		var taken []*Slab
		for range limit / n { // as many as a budget of limit bytes allows
			taken = append(taken, get(t, p, n))
			if _, live := p.Live(); live+p.cache.bytes > limit {
				t.Fatalf("%d bytes are handed out and %d cached, the limit is %d", live, p.cache.bytes, limit)
			}
		}
		for _, s := range taken {
			s.Release()
		}
	}
	get(t, p, mib) // more than the limit: nothing is left to give back
	if p.cache.bytes != 0 {
		t.Errorf("%d bytes stay cached beside 1 MiB, the limit is %d", p.cache.bytes, limit)
	}
}

func TestSizeOfIsWhatThePoolCounts(t *testing.T) {
	for _, n := range []int{0, 1, 4 * kib, 4*kib + 1, 64 * kib, 64*kib + 1, hugePage, hugePage + 1} {
		p := NewPool(0, System)
		s := get(t, p, n)
		if _, live := p.Live(); live != SizeOf(int64(n)) {
			t.Errorf("a slab of %d bytes takes %d, SizeOf says %d", n, live, SizeOf(int64(n)))
		}
		s.Release()
	}
	for _, n := range []int64{math.MaxInt64, math.MaxInt64 - 1, math.MaxInt64 - hugePage + 1} {
		if got := SizeOf(n); got != math.MaxInt64 {
			t.Errorf("SizeOf(%d) = %d, want the largest there is", n, got)
		}
	}
}

func TestTheCacheMakesRoomForTheSizesInUse(t *testing.T) {
	p := NewPool(mib, System)
	var old []*Slab
	for range 4 {
		old = append(old, get(t, p, 256*kib))
	}
	for _, s := range old {
		s.Release() // now the cache is full of a size that nobody asks for any more
	}
	s := get(t, p, 512*kib)
	s.Release()
	if get(t, p, 512*kib) != s {
		t.Error("yesterday's sizes keep today's out of the cache")
	}
}

func TestASlabForgetsMemoryThatWasGivenBack(t *testing.T) {
	for _, n := range []int{1, mapFrom} {
		s := get(t, NewPool(0, System), n)
		s.Release()
		if s.mem != nil {
			t.Errorf("a slab of %d bytes keeps memory that was given back", n)
		}
	}
}

func TestMemoryOverTheCacheGoesBackAtOnce(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("reads /proc/self/statm, which only Linux has")
	}
	if invariants.Enabled {
		t.Skip("poisoning touches the memory; the plain build checks this")
	}
	const size, rounds = 256 * mib, 64 // 16 GiB in all, none of it touched
	p := NewPool(mib, System)
	before := virtualPages(t)
	for range rounds {
		get(t, p, size).Release()
	}
	grown := (virtualPages(t) - before) * int64(os.Getpagesize())
	if grown > 4*size {
		t.Errorf("the process grew by %d MiB while it held at most %d MiB", grown/mib, size/mib)
	}
}

func virtualPages(t *testing.T) (n int64) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscan(string(text), &n); err != nil {
		t.Fatal(err)
	}
	return n
}

// counted is System memory that is counted, until it has no more.
type counted struct {
	mu          sync.Mutex // guards all below
	allocs, out int
	none        error
}

func (c *counted) Alloc(n int) ([]byte, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.none != nil {
		return nil, c.none
	}
	c.allocs++
	c.out++
	return System.Alloc(n)
}

func (c *counted) Free(mem []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.out--
	System.Free(mem)
}

func (c *counted) held() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.out
}

// collected runs the collector until done, which it brings about, holds.
func collected(t *testing.T, what string, done func() bool) {
	t.Helper()
	for range 1000 {
		if done() {
			return
		}
		runtime.GC()
	}
	t.Errorf("the collector never found %s", what)
}

func TestAForgottenSlabStaysMappedAndCounted(t *testing.T) {
	b := &counted{}
	p := NewPool(mib, b)
	var gone atomic.Bool
	bytes := func() []byte {
		s := get(t, p, mapFrom)
		runtime.AddCleanup(s, func(gone *atomic.Bool) { gone.Store(true) }, &gone)
		return s.Bytes()
	}()
	collected(t, "the forgotten slab", gone.Load)
	for i := range bytes {
		bytes[i] = 1 // which would fault
	}
	if slabs, live := p.Live(); slabs != 1 || live != mapFrom || b.held() != 1 {
		t.Errorf("%d slabs of %d bytes are counted, %d are held; want one", slabs, live, b.held())
	}
	s := get(t, p, mapFrom)
	if s.Bytes()[0] = 2; bytes[0] != 1 {
		t.Error("the memory of a forgotten slab was handed out again")
	}
	s.Release()
}

func TestAForgottenPoolFreesWhatItKeeps(t *testing.T) {
	b := &counted{}
	func() {
		p := NewPool(mib, b)
		for range 2 {
			s, other := get(t, p, mapFrom), get(t, p, 1)
			s.Release()
			other.Release()
		}
		if b.held() != 2 {
			t.Errorf("%d blocks are held, want 2", b.held())
		}
	}()
	collected(t, "the forgotten pool", func() bool { return b.held() == 0 })
}

func TestABackingWithoutMemoryFailsTheTaker(t *testing.T) {
	b := &counted{none: errors.New("none left")}
	p := NewPool(mib, b)
	if s, err := p.Get(1); s != nil || !errors.Is(err, ErrMemory) || !errors.Is(err, b.none) {
		t.Errorf("got %v, %v; want ErrMemory and why", s, err)
	}
	if slabs, live := p.Live(); slabs != 0 || live != 0 {
		t.Errorf("%d slabs of %d bytes are counted", slabs, live)
	}
	b.none = nil
	get(t, p, 1).Release()
	b.none = errors.New("none left")
	get(t, p, 1).Release() // kept from before
	if b.allocs != 1 {
		t.Errorf("memory was made %d times, want once", b.allocs)
	}
}

func TestReleasedMemoryIsPoisonedInInvariantBuilds(t *testing.T) {
	p := NewPool(mib, System)
	s := get(t, p, 4*kib)
	for i := range s.Bytes() {
		s.Bytes()[i] = 1
	}
	s.Release()
	b := get(t, p, 4*kib).Bytes()
	want := byte(1)
	if invariants.Enabled {
		want = 0xdb
	}
	if !bytes.Equal(b, bytes.Repeat([]byte{want}, len(b))) {
		t.Errorf("after the release the memory holds %#x…, want %#x", b[:4], want)
	}
}

func TestReuseAllocatesNothing(t *testing.T) {
	p := NewPool(mib, System)
	for _, n := range []int{1, mapFrom, mib} {
		if got := testing.AllocsPerRun(100, func() { get(t, p, n).Release() }); got != 0 {
			t.Errorf("%d bytes: %v allocations per reuse, want 0", n, got)
		}
	}
}

func TestPoolAndSlabsMayBeSharedByGoroutines(t *testing.T) {
	p := NewPool(256*kib, System)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 500 {
				n := 1 + (i*7919+g)%(128*kib)
				s := get(t, p, n)
				s.Bytes()[0], s.Bytes()[n-1] = byte(g), byte(g)
				s.Retain()
				wg.Go(s.Release)
				if s.Bytes()[0] != byte(g) || s.Bytes()[n-1] != byte(g) {
					t.Error("two holders were given the same memory")
				}
				s.Release()
			}
		})
	}
	wg.Wait()
	if slabs, bytes := p.Live(); slabs != 0 || bytes != 0 {
		t.Errorf("%d slabs, %d bytes are live at the end", slabs, bytes)
	}
}

func get(t testing.TB, p *Pool, n int) *Slab {
	t.Helper()
	s, err := p.Get(n)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func wantPanic(t *testing.T, text string, f func()) {
	t.Helper()
	defer func() {
		t.Helper()
		if got := fmt.Sprint(recover()); !strings.Contains(got, text) {
			t.Errorf("panic %q, want %q", got, text)
		}
	}()
	f()
}

func BenchmarkGetRelease(b *testing.B) {
	for _, n := range []int{4 * kib, mib, 16 * mib} {
		b.Run(fmt.Sprintf("bytes=%d", n), func(b *testing.B) {
			p := NewPool(int64(n), System)
			b.ReportAllocs()
			for b.Loop() {
				get(b, p, n).Release()
			}
		})
	}
}

func TestASlabOfPagesTakesOnlyThose(t *testing.T) {
	for _, tc := range []struct{ n, want int64 }{{0, 4 * kib}, {1, 4 * kib}, {100_000, 100 * kib}, {2_400_000, 586 * 4 * kib}, {3 * hugePage, 3 * hugePage}} {
		p := NewPool(8*hugePage, System)
		if got := PagesOf(tc.n); got != tc.want {
			t.Errorf("PagesOf(%d) is %d, want %d", tc.n, got, tc.want)
		}
		s, err := p.GetPages(int(tc.n))
		if err != nil {
			t.Fatal(err)
		}
		if _, live := p.Live(); live != tc.want || int64(len(s.Bytes())) != tc.n {
			t.Errorf("%d bytes take %d, want %d", tc.n, live, tc.want)
		}
		s.Release()
		if again, err := p.GetPages(int(tc.n)); err != nil || p.Kept() != 0 {
			t.Errorf("released pages of %d bytes are not taken again: %v", tc.n, err)
		} else {
			again.Release()
		}
	}
}
