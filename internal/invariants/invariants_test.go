package invariants

import (
	"bytes"
	"testing"
)

func TestPoisonOverwritesOnlyWhereChecksAreBuiltIn(t *testing.T) {
	b := []byte("content")
	Poison(b)
	Poison(nil)
	want := []byte("content")
	if Enabled {
		want = bytes.Repeat([]byte{0xdb}, len(want))
	}
	if !bytes.Equal(b, want) {
		t.Errorf("after Poison: %q, want %q", b, want)
	}
}

func TestAssertPanicsOnlyWhereChecksAreBuiltIn(t *testing.T) {
	Assert(true, "one is one")
	defer func() {
		if panicked := recover() != nil; panicked != Enabled {
			t.Errorf("a broken invariant panicked: %v, want %v", panicked, Enabled)
		}
	}()
	Assert(false, "one is two")
}
