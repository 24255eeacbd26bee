package main

import (
	"errors"
	"math"
	"testing"

	"github.com/KimMachineGun/automemlimit/memlimit"
)

func TestTheLeastOfWhatIsKnownHolds(t *testing.T) {
	unknown := func() (uint64, error) { return 1, errors.New("not known") }
	none := memlimit.Limit(0)
	for name, tc := range map[string]struct {
		group, machine memlimit.Provider
		want           int64
	}{
		"the group's":                 {memlimit.Limit(100), memlimit.Limit(200), 100},
		"the machine's":               {memlimit.Limit(300), memlimit.Limit(200), 200},
		"a group without a limit":     {unknown, memlimit.Limit(200), 200},
		"a machine that does not say": {memlimit.Limit(100), none, 100},
		"nothing is known":            {unknown, none, unknownMemory},
		"version 1 without a limit":   {memlimit.Limit(math.MaxUint64), none, unknownMemory},
	} {
		if got := leastOf(tc.group, tc.machine); got != tc.want {
			t.Errorf("%s: got %d, want %d", name, got, tc.want)
		}
	}
	if got := processMemory(); got <= 0 {
		t.Errorf("this process may have %d", got)
	}
}

func TestTheHeapHasWhatTensorsLeave(t *testing.T) {
	const gib = int64(1 << 30)
	for _, tc := range []struct{ all, outside, want int64 }{
		{16 * gib, 6 * gib, 9 * gib},
		{512 << 20, 192 << 20, (512 - 32 - 192) << 20},
		{512 << 20, 512 << 20, leastHeap},
		{gib, 1 << 62, leastHeap},
	} {
		if got := heapLimit(tc.all, tc.outside); got != tc.want {
			t.Errorf("of %d, %d outside: %d for the heap, want %d", tc.all, tc.outside, got, tc.want)
		}
	}
}
