package harness

import (
	"cmp"
	"fmt"
	"os"
	"runtime"
	"strings"
)

// Machine is where figures come from.
type Machine struct {
	CPU    string `json:"cpu"`
	Cores  int    `json:"cores"` // that this process may use
	Load   string `json:"load"`  // average of the last minute before; empty where nobody says
	Go     string `json:"go"`
	OS     string `json:"os"`
	Arch   string `json:"arch"`
	Commit string `json:"commit"` // empty when nobody knows; what follows it says that files had changed
}

// commit is set by the linker, as the Makefile has it do: go run has no version control to ask.
var commit string

// ThisMachine returns what this process runs on.
func ThisMachine() Machine {
	m := Machine{
		CPU: runtime.GOARCH, Cores: runtime.GOMAXPROCS(0),
		Commit: commit, Go: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH,
	}
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(text)) {
			if k, v, _ := strings.Cut(line, ":"); strings.TrimSpace(k) == "model name" {
				m.CPU = strings.TrimSpace(v)
				break
			}
		}
	}
	if text, err := os.ReadFile("/proc/loadavg"); err == nil {
		m.Load, _, _ = strings.Cut(string(text), " ")
	}
	return m
}

// String returns one line for people.
func (m Machine) String() string {
	return fmt.Sprintf("%s, %d cores, load %s · %s %s/%s · commit %s", m.CPU, m.Cores, cmp.Or(m.Load, "unknown"),
		m.Go, m.OS, m.Arch, cmp.Or(m.Commit, "unknown"))
}
