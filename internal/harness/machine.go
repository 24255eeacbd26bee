package harness

import (
	"cmp"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/tensorferry/tensorferry/internal/proc"
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

// commit is set by the linker where the build has no version control to ask: go
// run never has. The Makefile does.
var commit string

// ThisMachine returns what this process runs on.
func ThisMachine() Machine {
	m := Machine{
		CPU: runtime.GOARCH, Cores: runtime.GOMAXPROCS(0),
		Go: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH,
	}
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if model := proc.Field(string(text), "model name"); model != "" {
			m.CPU = model
		}
	}
	if text, err := os.ReadFile("/proc/loadavg"); err == nil {
		m.Load, _, _ = strings.Cut(string(text), " ")
	}
	if m.Commit = commit; commit != "" {
		return m
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			switch {
			case s.Key == "vcs.revision":
				m.Commit = s.Value[:min(12, len(s.Value))] + m.Commit
			case s.Key == "vcs.modified" && s.Value == "true":
				m.Commit += "-dirty"
			}
		}
	}
	return m
}

// String returns one line for people.
func (m Machine) String() string {
	return fmt.Sprintf("%s, %d cores, load %s · %s %s/%s · commit %s", m.CPU, m.Cores, cmp.Or(m.Load, "unknown"),
		m.Go, m.OS, m.Arch, cmp.Or(m.Commit, "unknown"))
}
