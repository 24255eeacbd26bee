package main

import (
	"io/fs"
	"math"
	"path"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
)

// unknownMemory is assumed on a machine that does not say what it has.
const unknownMemory = 4 << 30

// processMemory is what this process may have: the least of GOMEMLIMIT, its
// control groups' limits and the machine's memory. The root is that of the system.
func processMemory(root fs.FS) int64 {
	least := min(debug.SetMemoryLimit(-1), groupMemory(root), machineMemory(root))
	if least == math.MaxInt64 {
		return unknownMemory
	}
	return least
}

// machineMemory is the machine's, MaxInt64 where it does not say.
func machineMemory(root fs.FS) int64 {
	text, _ := fs.ReadFile(root, "proc/meminfo") // not there: it does not say
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "MemTotal:" { // in kB
			if n, err := strconv.ParseInt(f[1], 10, 64); err == nil {
				return n << 10
			}
		}
	}
	return math.MaxInt64
}

// groupMemory is the least limit of the process' control group and those above
// it, of version 2 or 1; MaxInt64 without any. A group that is not mounted here,
// as in a container, is skipped: what is mounted lies on the way up.
func groupMemory(root fs.FS) int64 {
	least := int64(math.MaxInt64)
	text, _ := fs.ReadFile(root, "proc/self/cgroup") // not there: no groups
	for line := range strings.Lines(string(text)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3) // number:controllers:/path
		if len(f) < 3 {
			continue
		}
		top, name := "sys/fs/cgroup", "memory.max"
		if f[0] != "0" || f[1] != "" { // version 1
			if !slices.Contains(strings.Split(f[1], ","), "memory") {
				continue
			}
			top, name = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
		}
		for group := path.Clean("/" + f[2]); ; group = path.Dir(group) {
			text, err := fs.ReadFile(root, path.Join(top, group, name))
			if err == nil {
				if n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil { // or "max"
					least = min(least, n)
				}
			}
			if group == "/" {
				break
			}
		}
	}
	return least
}
