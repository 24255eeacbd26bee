package slab

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"pgregory.net/rapid"
)

var principals sync.Map

// who is the one principal of a name.
func who(name string) *Principal {
	p, _ := principals.LoadOrStore(name, NewPrincipal(name))
	return p.(*Principal)
}

// ask starts an Acquire in the background. Within a synctest bubble, after
// synctest.Wait, the state of the asker is settled.
type asker struct {
	holder string
	n      int64
	cancel context.CancelCauseFunc
	done   bool
	err    error
}

func ask(b *Budget, holder string, n int64) *asker {
	ctx, cancel := context.WithCancelCause(context.Background())
	a := &asker{holder: holder, n: n, cancel: cancel}
	go func() {
		a.err = b.Acquire(ctx, who(holder), n)
		a.done = true
	}()
	synctest.Wait()
	return a
}

func (a *asker) granted() bool { return a.done && a.err == nil }

func wantUsed(t *testing.T, b *Budget, used, peak int64) {
	t.Helper()
	if u, p, _ := b.Used(); u != used || p != peak {
		t.Errorf("used %d, peak %d; want %d and %d", u, p, used, peak)
	}
}

func TestABudgetGrantsUpToItsLimit(t *testing.T) {
	b := NewBudget("memory", 100)
	for _, n := range []int64{0, 1, 99} {
		if err := b.Acquire(t.Context(), who("a"), n); err != nil {
			t.Fatal(err)
		}
	}
	wantUsed(t, b, 100, 100)
	for _, n := range []int64{99, 0, 1} {
		b.Release(who("a"), n)
	}
	wantUsed(t, b, 0, 100)
	if len(b.holders) != 0 {
		t.Errorf("a holder of nothing is remembered: %v", b.holders)
	}
}

func TestWhatCanNeverBeGrantedFailsAtOnce(t *testing.T) {
	b := NewBudget("memory", 100)
	for _, n := range []int64{101, math.MaxInt64, -1, math.MinInt64} {
		if err := b.Acquire(t.Context(), who("a"), n); !errors.Is(err, ErrBudget) {
			t.Errorf("%d bytes: %v, want ErrBudget", n, err)
		}
		if b.TryAcquire(who("a"), n) {
			t.Errorf("%d bytes of 100 were granted", n)
		}
	}
	wantUsed(t, b, 0, 0)
}

func TestAnErrorNamesItsBudget(t *testing.T) {
	err := NewBudget("pinned memory", 100).Acquire(t.Context(), who("a"), 101)
	if want := "slab: over the budget for pinned memory: 101 bytes asked, the budget is 100"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

func TestPrincipalsOfOneNameAreTwoHolders(t *testing.T) {
	b := NewBudget("memory", 100)
	first, second := NewPrincipal("same"), NewPrincipal("same")
	for _, p := range []*Principal{first, second} {
		if !b.TryAcquire(p, 50) || b.TryAcquire(p, 1) {
			t.Error("a principal did not get its half, or got more")
		}
	}
	b.Release(first, 50)
	wantPanic(t, `slab: "same" releases 1 bytes and holds 0`, func() { b.Release(first, 1) })
	if !b.TryAcquire(nil, 1) {
		t.Error("nobody in particular was refused")
	}
	wantPanic(t, `slab: "nobody" releases`, func() { b.Release(nil, 2) })
}

func TestTheLargestBudgetDoesNotOverflow(t *testing.T) {
	b := NewBudget("memory", math.MaxInt64)
	if err := b.Acquire(t.Context(), who("a"), math.MaxInt64-1); err != nil {
		t.Fatal(err)
	}
	if b.TryAcquire(who("b"), 2) {
		t.Error("more than the budget was granted")
	}
	if b.TryAcquire(who("a"), 1) {
		t.Error("a holder got more than its half")
	}
	if !b.TryAcquire(who("b"), 1) {
		t.Error("the last byte was not granted")
	}
}

func TestReleasingMoreThanIsHeldPanics(t *testing.T) {
	b := NewBudget("memory", 100)
	if !b.TryAcquire(who("a"), 10) {
		t.Fatal("10 of 100 bytes were not granted")
	}
	for _, release := range []func(){
		func() { b.Release(who("a"), 11) },
		func() { b.Release(who("b"), 1) },
		func() { b.Release(who("a"), -1) },
	} {
		wantPanic(t, "slab: ", release)
	}
	wantUsed(t, b, 10, 10)
}

func TestWaitersAreServedInTheirOrderAllOrNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := NewBudget("memory", 100)
		first := ask(b, "a", 90)
		large := ask(b, "b", 50)
		small := ask(b, "c", 10) // would fit, but came later
		if !first.granted() || large.done || small.done {
			t.Fatal("want the first granted and the others waiting in line")
		}
		if b.TryAcquire(who("d"), 1) {
			t.Error("TryAcquire jumped the line")
		}
		wantUsed(t, b, 90, 90)
		b.Release(who("a"), 30)
		synctest.Wait()
		if large.done {
			t.Error("50 bytes were granted with 40 free")
		}
		b.Release(who("a"), 60)
		synctest.Wait()
		if !large.granted() || !small.granted() {
			t.Error("both fit now and were not granted")
		}
		wantUsed(t, b, 60, 90)
	})
}

func TestAHolderOverItsHalfIsPassedOverWhileOthersWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := NewBudget("memory", 100)
		mine := ask(b, "greedy", 40)
		theirs := ask(b, "other", 60)
		more := ask(b, "greedy", 20) // with the 40 it holds, over its half
		modest := ask(b, "modest", 30)
		if !mine.granted() || !theirs.granted() || more.done || modest.done {
			t.Fatal("want 40 and 60 granted, 20 and 30 waiting")
		}
		b.Release(who("other"), 30)
		synctest.Wait()
		if more.done || !modest.granted() {
			t.Error("want the one over its half passed over by the one behind it")
		}
		b.Release(who("other"), 30)
		synctest.Wait()
		if !more.granted() {
			t.Error("nobody else waits: more than half may be granted")
		}
	})
}

func TestTheFirstAmountOfAHolderMayBeMoreThanHalfAndTakesItsTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := NewBudget("memory", 100)
		mine := ask(b, "other", 30)
		large := ask(b, "large", 80)
		small := ask(b, "small", 10)
		if !mine.granted() || large.done || small.done {
			t.Fatal("want 30 granted, 80 first in line and 10 behind it")
		}
		b.Release(who("other"), 30)
		synctest.Wait()
		if !large.granted() || !small.granted() {
			t.Error("the first in line was passed over although it held nothing")
		}
	})
}

func TestAHolderAloneMayHaveItAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := NewBudget("memory", 100)
		for range 4 {
			if a := ask(b, "alone", 25); !a.granted() {
				t.Fatal("a quarter was refused to the only holder")
			}
		}
	})
}

func TestTheNextOneIsServedWhenTheFirstInLineGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := NewBudget("memory", 100)
		held := ask(b, "a", 60)
		large := ask(b, "b", 80)
		small := ask(b, "c", 40)
		why := errors.New("call cancelled")
		large.cancel(why)
		synctest.Wait()
		if !held.granted() || !errors.Is(large.err, why) || !small.granted() {
			t.Errorf("large: %v, small granted: %v; want the cause and true", large.err, small.granted())
		}
		wantUsed(t, b, 100, 100)
	})
}

func TestACancelThatMeetsItsGrantGivesItBack(t *testing.T) {
	b := NewBudget("memory", 10)
	for range 2000 {
		if err := b.Acquire(context.Background(), who("a"), 10); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		got := make(chan error)
		go func() { got <- b.Acquire(ctx, who("b"), 10) }()
		go cancel()
		b.Release(who("a"), 10)
		if <-got == nil {
			b.Release(who("b"), 10)
		}
	}
	wantUsed(t, b, 0, 10)
	if len(b.holders)+len(b.queue) != 0 {
		t.Errorf("left over: holders %v, %d in the queue", b.holders, len(b.queue))
	}
}

func TestABudgetMayBeSharedByGoroutines(t *testing.T) {
	const limit = 1000
	b := NewBudget("memory", limit)
	var wg sync.WaitGroup
	for g := range 8 {
		holder := string(rune('a' + g%4))
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 1))
			for range 500 {
				n := r.Int64N(limit/2 + 1)
				ctx, cancel := context.WithCancel(context.Background())
				if r.IntN(4) == 0 {
					wg.Go(cancel)
				}
				if r.IntN(4) == 0 {
					if b.TryAcquire(who(holder), n) {
						b.Release(who(holder), n)
					}
				} else if b.Acquire(ctx, who(holder), n) == nil {
					if used, _, _ := b.Used(); used > limit {
						t.Errorf("%d of %d bytes are granted", used, limit)
					}
					b.Release(who(holder), n)
				}
				cancel()
			}
		})
	}
	wg.Wait()
	if used, _, _ := b.Used(); used != 0 || len(b.holders)+len(b.queue) != 0 {
		t.Errorf("left over: %d bytes, holders %v, %d in the queue", used, b.holders, len(b.queue))
	}
}

// model is the budget, slow and obvious: whoever asked, in order of asking, and
// after each event the rules applied from the beginning.
type model struct {
	limit int64
	asked []*modelAsk
}

type modelAsk struct {
	holder  string
	n       int64
	granted bool
}

func (m *model) held(holder string) (n int64) {
	for _, a := range m.asked {
		if a.granted && (holder == "" || a.holder == holder) {
			n += a.n
		}
	}
	return n
}

func (m *model) othersWait(holder string) bool {
	return slices.ContainsFunc(m.asked, func(a *modelAsk) bool { return !a.granted && a.holder != holder })
}

// next is who is granted next: the first in line who is not passed over, if it fits.
func (m *model) next() *modelAsk {
	for _, a := range m.asked {
		if a.granted {
			continue
		}
		held := m.held(a.holder)
		if held > 0 && held+a.n > m.limit/2 && m.othersWait(a.holder) {
			continue // passed over
		}
		if m.held("")+a.n <= m.limit {
			return a
		}
		return nil // stops the line
	}
	return nil
}

func (m *model) settle() {
	for a := m.next(); a != nil; a = m.next() {
		a.granted = true
	}
}

// step is one event of a random story.
type step struct {
	Kind   int // 0, 1, 2 ask; 3 try; 4, 5 end one: a release, or a cancel if it waits
	Holder string
	N      int64
	Which  int
}

// TestABudgetFollowsItsModel tells random stories to the budget and to the
// model, and compares who holds what after every step.
func TestABudgetFollowsItsModel(t *testing.T) {
	const limit = 20
	steps := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) step {
		return step{
			Kind:   rapid.IntRange(0, 5).Draw(t, "kind"),
			Holder: rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "holder"),
			N:      rapid.Int64Range(0, limit).Draw(t, "n"),
			Which:  rapid.IntRange(0, 9).Draw(t, "which"),
		}
	}), 1, 40)
	rapid.Check(t, func(rt *rapid.T) {
		story := steps.Draw(rt, "story")
		var failure string
		synctest.Test(t, func(*testing.T) { failure = tell(limit, story) })
		if failure != "" {
			rt.Fatal(failure)
		}
	})
}

// tell returns what went wrong, or nothing. It ends with everything given back.
func tell(limit int64, story []step) string {
	b, m := NewBudget("memory", limit), &model{limit: limit}
	var askers []*asker // askers[i] is m.asked[i]
	end := func(i int) {
		a := askers[i]
		askers = slices.Delete(askers, i, i+1)
		m.asked = slices.Delete(m.asked, i, i+1)
		if a.granted() {
			b.Release(who(a.holder), a.n)
		}
		a.cancel(nil)
		synctest.Wait()
		m.settle()
	}
	defer func() {
		for len(askers) > 0 {
			end(len(askers) - 1)
		}
	}()
	check := func(i int) string {
		for k, a := range askers {
			if want := m.asked[k].granted; a.granted() != want {
				return fmt.Sprintf("step %d: %d bytes for %s: granted %v, want %v", i, a.n, a.holder, a.granted(), want)
			}
		}
		if used, _, _ := b.Used(); used != m.held("") || used > limit {
			return fmt.Sprintf("step %d: %d bytes used, want %d, at most %d", i, used, m.held(""), limit)
		}
		return ""
	}
	for i, s := range story {
		switch {
		case s.Kind < 3:
			m.asked = append(m.asked, &modelAsk{holder: s.Holder, n: s.N})
			m.settle()
			askers = append(askers, ask(b, s.Holder, s.N))
		case s.Kind == 3:
			want := !slices.ContainsFunc(m.asked, func(a *modelAsk) bool { return !a.granted }) &&
				m.held("")+s.N <= limit && m.held(s.Holder)+s.N <= limit/2
			if got := b.TryAcquire(who(s.Holder), s.N); got != want {
				if got {
					b.Release(who(s.Holder), s.N)
				}
				return fmt.Sprintf("step %d: TryAcquire(%s, %d) = %v, want %v", i, s.Holder, s.N, got, want)
			}
			if want {
				m.asked = append(m.asked, &modelAsk{s.Holder, s.N, true})
				askers = append(askers, &asker{holder: s.Holder, n: s.N, done: true, cancel: func(error) {}})
			}
		case len(askers) > 0:
			end(s.Which % len(askers))
		}
		if wrong := check(i); wrong != "" {
			return wrong
		}
	}
	for len(askers) > 0 {
		end(0)
	}
	if used, _, _ := b.Used(); used != 0 || len(b.holders)+len(b.queue) != 0 {
		return fmt.Sprintf("left over: %d bytes, holders %v, %d in the queue", used, b.holders, len(b.queue))
	}
	return ""
}

func TestWhatIsKeptForAHolderIsItsWhoeverWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := NewBudget("memory", 100)
		part := b.Keep(20)
		small, other := NewPrincipal("small").In(part), NewPrincipal("other").In(part)
		if err := b.Acquire(t.Context(), who("a"), 81); !errors.Is(err, ErrBudget) || !strings.Contains(err.Error(), "20 are kept") {
			t.Errorf("%v, want ErrBudget: 20 bytes are never for others", err)
		}
		large, behind := ask(b, "a", 70), ask(b, "b", 20)
		if !large.granted() || behind.done {
			t.Fatal("want 70 granted and 20 waiting")
		}
		if !b.TryAcquire(small, 10) || !b.TryAcquire(other, 10) || b.TryAcquire(small, 1) {
			t.Error("each has half of the part, at once, and no more while others wait")
		}
		got := make(chan error, 1)
		go func() { got <- b.Acquire(t.Context(), small, 5) }()
		synctest.Wait()
		b.Release(small, 10) // its part has room again
		if err := <-got; err != nil || behind.done {
			t.Errorf("%v; want what is kept granted before what waits", err)
		}
		b.Release(small, 5)
		part.End()
		synctest.Wait()
		if !behind.granted() {
			t.Error("what is not kept any more was not granted")
		}
		wantUsed(t, b, 100, 100)
	})
}
