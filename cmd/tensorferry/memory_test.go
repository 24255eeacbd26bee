package main

import (
	"math"
	"testing"
	"testing/fstest"
)

func TestTheLeastLimitOnTheWayUpHolds(t *testing.T) {
	const v2, v1 = "sys/fs/cgroup/", "sys/fs/cgroup/memory/"
	for name, tc := range map[string]struct {
		files map[string]string
		want  int64
	}{
		"no groups": {nil, math.MaxInt64},
		"a group without a limit": {map[string]string{
			"proc/self/cgroup": "0::/a\n", v2 + "a/memory.max": "max\n",
		}, math.MaxInt64},
		"the group's own": {map[string]string{
			"proc/self/cgroup": "0::/a/b\n", v2 + "a/b/memory.max": "100\n", v2 + "a/memory.max": "200\n",
		}, 100},
		"one above": {map[string]string{
			"proc/self/cgroup": "0::/a/b\n", v2 + "a/b/memory.max": "max\n", v2 + "a/memory.max": "200\n", v2 + "c/memory.max": "1\n",
		}, 200},
		"the group of a container is the top": {map[string]string{
			"proc/self/cgroup": "0::/\n", v2 + "memory.max": "300\n",
		}, 300},
		"a group that is not mounted": {map[string]string{
			"proc/self/cgroup": "0::/../../a/b\n", v2 + "memory.max": "400\n",
		}, 400},
		"version 1, among other controllers": {map[string]string{
			"proc/self/cgroup":                  "5:cpu,cpuacct:/x\n4:memory:/a:b\n0::/\n",
			v1 + "a:b/memory.limit_in_bytes":    "500\n",
			v1 + "memory.limit_in_bytes":        "9223372036854771712\n",
			"sys/fs/cgroup/cpu/x/memory.max":    "1\n",
			"sys/fs/cgroup/x/memory.max":        "2\n",
			v1 + "x/memory.limit_in_bytes":      "3\n",
			"sys/fs/cgroup/a:b/memory.max":      "4\n",
			"sys/fs/cgroup/memory/a:b/cpu.stat": "5\n",
		}, 500},
		"lines that are none": {map[string]string{"proc/self/cgroup": "\n0\n0:\n"}, math.MaxInt64},
	} {
		t.Run(name, func(t *testing.T) {
			root := fstest.MapFS{}
			for name, text := range tc.files {
				root[name] = &fstest.MapFile{Data: []byte(text)}
			}
			if got := groupMemory(root); got != tc.want {
				t.Errorf("got %d, want %d", got, tc.want)
			}
		})
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

func TestAMachineThatDoesNotSayHasSome(t *testing.T) {
	meminfo := fstest.MapFS{"proc/meminfo": {Data: []byte("MemFree: 1 kB\nMemTotal:  2048 kB\n")}}
	if got := processMemory(meminfo); got != 2<<20 {
		t.Errorf("got %d of 2 MiB", got)
	}
	if got := machineMemory(fstest.MapFS{}); got != math.MaxInt64 {
		t.Errorf("got %d from a machine that does not say", got)
	}
}
