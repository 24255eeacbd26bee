package slab

import (
	"context"
	"errors"
	"testing"
)

// failing has no memory.
type failing struct{}

func (failing) Alloc(int) ([]byte, error) { return nil, errors.New("none") }
func (failing) Free([]byte)               {}

func TestAnAccountGivesBackWhatItHasTaken(t *testing.T) {
	b := NewBudget("memory", 100)
	a, other := b.Account(who("a")), b.Account(who("a"))
	if !a.Take(0) || !a.Take(30) || !other.Take(20) || a.Take(51) {
		t.Error("it takes what the budget grants, and a holder may have half")
	}
	if err := a.Wait(t.Context(), 10); err != nil {
		t.Error(err)
	}
	a.Release(5)
	if a.Held() != 35 || other.Held() != 20 {
		t.Errorf("it holds %d, the other %d; want 35 and 20", a.Held(), other.Held())
	}
	a.Close()
	a.Close()
	wantUsed(t, b, 20, 60)
	if a.Take(1) || !errors.Is(a.Wait(t.Context(), 1), ErrBudget) {
		t.Error("a closed account takes nothing")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := other.Wait(ctx, 90); !errors.Is(err, context.Canceled) {
		t.Errorf("a wait that ends is %v", err)
	}
	wantUsed(t, b, 20, 60)
	other.Close()
	wantUsed(t, b, 0, 60)
}

func TestASlabGivesItsAccountBackWhatItTook(t *testing.T) {
	b, p := NewBudget("memory", 100*kib), NewPool(0, System)
	a := b.Account(nil)
	for _, n := range []int{0, 1, 4 * kib, 4*kib + 1} {
		size := PagesOf(int64(n))
		if !a.Take(size) {
			t.Fatal("there is room")
		}
		s, err := a.Get(p, n, size)
		if err != nil || len(s.Bytes()) != n {
			t.Fatal(err)
		}
		s.Retain()
		s.Release()
		wantHeld(t, a, size)
		s.Release()
		wantHeld(t, a, 0)
	}
	if !a.Take(4 * kib) {
		t.Fatal("there is room")
	}
	if _, err := a.Get(NewPool(0, failing{}), 1, 4*kib); !errors.Is(err, ErrMemory) {
		t.Errorf("a pool without memory: %v", err)
	}
	wantHeld(t, a, 0)
}

func wantHeld(t *testing.T, a *Account, n int64) {
	t.Helper()
	if a.Held() != n {
		t.Errorf("it holds %d bytes, want %d", a.Held(), n)
	}
}
