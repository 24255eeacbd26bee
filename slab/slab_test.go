package slab

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/tensorferry/tensorferry/internal/invariants"
)

const mib = 1 << 20

func TestSizeClassHoldsWhatWasAskedAndIsItsOwnClass(t *testing.T) {
	for n, want := range map[int]int{
		0: 4 * kib, 1: 4 * kib, 4*kib - 1: 4 * kib, 4 * kib: 4 * kib, 4*kib + 1: 8 * kib,
		16*kib - 1: 16 * kib, 16 * kib: 16 * kib, 16*kib + 1: 20 * kib,
		64 * kib: 64 * kib, 64*kib + 1: 128 * kib,
		mib: mib, hugePage: hugePage, hugePage + 1: 2 * hugePage, 256 * mib: 256 * mib,
	} {
		if got := sizeClass(n); got != want {
			t.Errorf("sizeClass(%d) = %d, want %d", n, got, want)
		}
		if again := sizeClass(want); again != want {
			t.Errorf("sizeClass(%d) = %d: a class must hold itself", want, again)
		}
	}
}

func TestGetHandsOverExactlyTheBytesAsked(t *testing.T) {
	p := NewPool(mib)
	for _, n := range []int{0, 1, 1024, 1025, 16383, 16384, 16385, mapFrom - 1, mapFrom, mapFrom + 1, 2*mib + 1} {
		s := p.Get(n)
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
	wantPanic(t, "slab: a slab of -1 bytes", func() { NewPool(0).Get(-1) })
}

func TestASlabLivesUntilItsLastRelease(t *testing.T) {
	p := NewPool(mib)
	s := p.Get(100)
	s.Retain()
	s.Release()
	if slabs, bytes := p.Live(); slabs != 1 || bytes != 4*kib {
		t.Errorf("%d slabs, %d bytes are live, want one of 4096", slabs, bytes)
	}
	copy(s.Bytes(), "still mine")
	if other := p.Get(100); other == s {
		t.Error("a slab with a reference left was handed out again")
	}
	s.Release()
	if again := p.Get(100); again != s {
		t.Error("a released slab was not handed out again")
	}
}

func TestOneReleaseTooManyPanics(t *testing.T) {
	s := NewPool(mib).Get(1)
	s.Release()
	wantPanic(t, "slab: released more often than retained", s.Release)
}

func TestRetainOfAReleasedSlabPanics(t *testing.T) {
	s := NewPool(mib).Get(1)
	s.Release()
	wantPanic(t, "slab: retain of a released slab", s.Retain)
}

func TestAReusedSlabHasTheSizeOfItsNewTaker(t *testing.T) {
	p := NewPool(mib)
	first := p.Get(5000)
	first.Release()
	second := p.Get(8192)
	if second != first {
		t.Fatal("two sizes of one class do not share a slab")
	}
	if n := len(second.Bytes()); n != 8192 {
		t.Errorf("the slab shows %d bytes, want 8192", n)
	}
	second.Release()
	if p.Get(8193) == second {
		t.Error("a slab was handed out for more than it holds")
	}
}

func TestTheCacheNeverHoldsMoreThanItsLimit(t *testing.T) {
	for _, limit := range []int64{0, 4*kib - 1, 4 * kib, 100 * kib, mib} {
		p := NewPool(limit)
		var taken []*Slab
		for _, n := range []int{1, 4 * kib, 64 * kib, 1, 64*kib + 1, mib, mib + 1, 8 * kib} {
			taken = append(taken, p.Get(n))
		}
		for _, s := range taken {
			s.Release()
			var sum int64
			for class, list := range p.free {
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
	p := NewPool(limit)
	for _, n := range []int{4 * kib, 64 * kib, 4 * kib, 128 * kib, 20 * kib, 256 * kib, 4 * kib, 64 * kib} {
		var taken []*Slab
		for range limit / n { // as many as a budget of limit bytes allows
			taken = append(taken, p.Get(n))
			if _, live := p.Live(); live+p.cached > limit {
				t.Fatalf("%d bytes are handed out and %d cached, the limit is %d", live, p.cached, limit)
			}
		}
		for _, s := range taken {
			s.Release()
		}
	}
	p.Get(mib) // more than the limit: nothing is left to give back
	if p.cached != 0 {
		t.Errorf("%d bytes stay cached beside 1 MiB, the limit is %d", p.cached, limit)
	}
}

func TestSizeOfIsWhatThePoolCounts(t *testing.T) {
	for _, n := range []int{0, 1, 4 * kib, 4*kib + 1, 64 * kib, 64*kib + 1, hugePage, hugePage + 1} {
		p := NewPool(0)
		s := p.Get(n)
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
	p := NewPool(mib)
	var old []*Slab
	for range 4 {
		old = append(old, p.Get(256*kib))
	}
	for _, s := range old {
		s.Release() // now the cache is full of a size that nobody asks for any more
	}
	s := p.Get(512 * kib)
	s.Release()
	if p.Get(512*kib) != s {
		t.Error("yesterday's sizes keep today's out of the cache")
	}
}

func TestASlabForgetsMemoryThatWasGivenBack(t *testing.T) {
	for _, n := range []int{1, mapFrom} {
		s := NewPool(0).Get(n)
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
	p := NewPool(mib)
	before := virtualPages(t)
	for range rounds {
		p.Get(size).Release()
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

func TestAMappedSlabThatWasLostIsUnmappedByTheCollector(t *testing.T) {
	if _, mapped := allocate(mapFrom); !mapped {
		t.Skip("this platform maps nothing outside the Go heap")
	}
	p := NewPool(mib)
	gone := make(chan struct{})
	func() {
		s := p.Get(mapFrom)
		runtime.AddCleanup(s, func(gone chan struct{}) { close(gone) }, gone)
	}()
	for range 100 {
		runtime.GC()
		select {
		case <-gone:
			return
		default:
		}
	}
	t.Error("the collector never found the lost slab")
}

func TestReleasedMemoryIsPoisonedInInvariantBuilds(t *testing.T) {
	p := NewPool(mib)
	s := p.Get(4 * kib)
	for i := range s.Bytes() {
		s.Bytes()[i] = 1
	}
	s.Release()
	b := p.Get(4 * kib).Bytes()
	want := byte(1)
	if invariants.Enabled {
		want = 0xdb
	}
	if !bytes.Equal(b, bytes.Repeat([]byte{want}, len(b))) {
		t.Errorf("after the release the memory holds %#x…, want %#x", b[:4], want)
	}
}

func TestReuseAllocatesNothing(t *testing.T) {
	p := NewPool(mib)
	for _, n := range []int{1, mapFrom, mib} {
		if got := testing.AllocsPerRun(100, func() { p.Get(n).Release() }); got != 0 {
			t.Errorf("%d bytes: %v allocations per reuse, want 0", n, got)
		}
	}
}

func TestPoolAndSlabsMayBeSharedByGoroutines(t *testing.T) {
	p := NewPool(256 * kib)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 500 {
				n := 1 + (i*7919+g)%(128*kib)
				s := p.Get(n)
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
			p := NewPool(int64(n))
			b.ReportAllocs()
			for b.Loop() {
				p.Get(n).Release()
			}
		})
	}
}
