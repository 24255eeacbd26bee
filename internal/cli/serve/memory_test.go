package serve

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
		from           string
		unseen         bool
	}{
		"the group's":                 {memlimit.Limit(100), memlimit.Limit(200), 100, "control group", false},
		"the machine's":               {memlimit.Limit(300), memlimit.Limit(200), 200, "machine", false},
		"a group that cannot be seen": {unknown, memlimit.Limit(200), 200, "machine", true},
		"a group without a limit":     {func() (uint64, error) { return 0, memlimit.ErrNoLimit }, memlimit.Limit(200), 200, "machine", false},
		"a machine that does not say": {memlimit.Limit(100), none, 100, "control group", false},
		"nothing is known":            {unknown, none, unknownMemory, "nothing: it is assumed", true},
		"version 1 without a limit":   {memlimit.Limit(math.MaxUint64), none, unknownMemory, "nothing: it is assumed", false},
	} {
		got, from, unseen := memoryLimit(tc.group, tc.machine)
		if got != tc.want || from != tc.from || (unseen != nil) != tc.unseen {
			t.Errorf("%s: got %d from %s, unseen: %v; want %d", name, got, from, unseen, tc.want)
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
