package slab

import "testing"

func TestWhatCanBeSparedIsReclaimedForWhoLacksIt(t *testing.T) {
	b := NewBudget("memory", 100)
	idle := []string{"a", "b", "c"}
	for _, h := range idle {
		if !b.TryAcquire(who(h), 30) {
			t.Fatal("no room")
		}
	}
	asked := 0
	b.Reclaim(func() bool {
		asked++
		if len(idle) == 0 {
			return false
		}
		b.Release(who(idle[0]), 30)
		idle = idle[1:]
		return true
	})
	if !b.TryAcquire(who("d"), 10) || asked != 0 {
		t.Fatalf("asked %d times for what fits", asked)
	}
	if !b.TryAcquire(who("d"), 35) || asked != 2 || len(idle) != 1 {
		t.Fatalf("asked %d times, %d left", asked, len(idle))
	}
	if err := b.Acquire(t.Context(), who("e"), 50); err != nil || len(idle) != 0 {
		t.Fatalf("%v, %d left", err, len(idle))
	}
	if b.TryAcquire(who("f"), 10) {
		t.Fatal("granted what is not there")
	}
	b.Release(who("d"), 45)
	b.Release(who("e"), 50)
	if used, _, _ := b.Used(); used != 0 {
		t.Fatalf("%d bytes used", used)
	}
}
