package proc

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// Resident is the memory of a process that is present, in bytes.
type Resident struct {
	Own    int64 // nobody else's
	Mapped int64 // pages of files, which the system may take back, and programs share
	Peak   int64 // the most that both together have been
}

// ResidentOf returns that of a living process. It fails where the system does not tell.
func ResidentOf(pid int) (r Resident, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return r, fmt.Errorf("memory is read from /proc, as Linux has it: %w", err)
	}
	for name, to := range map[string]*int64{"RssAnon": &r.Own, "RssShmem": &r.Own, "RssFile": &r.Mapped, "VmHWM": &r.Peak} {
		value, _, _ := strings.Cut(Field(string(text), name), " ") // in kB
		n, err := strconv.ParseInt(value, 10, 64)
		if err != nil {
			return r, fmt.Errorf("no %s in the status of process %d", name, pid)
		}
		*to += n << 10
	}
	return r, nil
}

// Deleted returns how many mapped files of a process are gone whose names end so.
func Deleted(pid int, suffix string) (int, error) {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	return bytes.Count(maps, []byte(suffix+" (deleted)\n")), err
}

// Descriptors returns how many are open in this process.
func Descriptors() (int, error) {
	list, err := os.ReadDir("/proc/self/fd")
	return len(list), err
}

// Field returns the value of the first "name : value" line of a file of /proc.
func Field(text, name string) string {
	for line := range strings.Lines(text) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == name {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

// Times are what the CPUs of the machine have spent since it started, in a unit of the system's.
type Times struct{ Busy, Total float64 }

// Machine returns that of this machine. It fails where the system does not tell.
func Machine() (t Times, err error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return t, fmt.Errorf("CPU times are read from /proc, as Linux has it: %w", err)
	}
	line, _, _ := strings.Cut(string(text), "\n")
	fields := strings.Fields(line)
	for i, text := range fields[1:min(len(fields), 9)] { // what follows, guests', is part of user and nice
		n, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return t, fmt.Errorf("CPU times of the machine: %w", err)
		}
		t.Total += n
		if i != 3 && i != 4 { // idle, waiting for I/O
			t.Busy += n
		}
	}
	return t, nil
}

// Memory returns that of the machine, in bytes. It fails where the system does not tell.
func Memory() (int64, error) {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, fmt.Errorf("memory is read from /proc, as Linux has it: %w", err)
	}
	value, _, _ := strings.Cut(Field(string(text), "MemTotal"), " ") // in kB
	n, err := strconv.ParseInt(value, 10, 64)
	return n << 10, err
}
