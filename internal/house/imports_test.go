package house

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// anything stands for every package of the module: at the rim, where all is
// wired together.
const anything = "anything"

// layers is the arrow diagram of the module: who imports whom, lowest first. Every
// package is on it, and every arrow is used.
var layers = map[string][]string{
	"api/kpu/torch/server": {},
	"api/splitlearn/comm":  {},
	"api/tensorferry/v1":   {},
	"engine/cuda/fakecuda": {},
	"engine/cuda/kernels":  {},
	"identity":             {"reason"},
	"examples/fashion":     {},
	"examples/text":        {},
	"internal/background":  {},
	"internal/glob":        {},
	"internal/fault":       {},
	"internal/house":       {},
	"internal/invariants":  {},
	"internal/metrics":     {},
	"internal/proc":        {},
	"internal/roads":       {},
	"reason":               {},
	"tensor":               {},

	"chunker":            {"tensor"},
	"internal/minifloat": {"tensor"},
	"internal/recent":    {"tensor"},
	"slab":               {"internal/invariants"},
	"tensorfile":         {"tensor"},

	"codec":              {"slab", "tensor"},
	"engine":             {"slab", "tensor"},
	"internal/admission": {"slab"},
	"internal/harness":   {"internal/proc"},
	"internal/elements":  {"internal/minifloat", "tensor", "tensorfile"},
	"internal/link":      {"slab"},
	"internal/testkit":   {"slab"},
	"internal/torchsave": {"tensor", "tensorfile"},

	"assembler":         {"codec", "internal/invariants", "tensor"},
	"engine/blocks":     {"engine", "slab", "tensor"},
	"engine/builtin":    {"engine", "tensor"},
	"engine/enginetest": {"engine", "slab", "tensor"},
	"engine/stack":      {"engine", "internal/minifloat", "tensor", "tensorfile"},
	"frame":             {"codec", "reason", "tensor"},
	"internal/attack":   {"api/tensorferry/v1", "codec", "tensor"},
	"store":             {"codec", "internal/background", "internal/glob", "slab", "store/generate", "tensor", "tensorfile"},
	"store/generate":    {"internal/minifloat", "tensor"},

	"internal/shelf": {"codec", "internal/background", "internal/fault", "internal/glob", "slab", "store", "tensor", "tensorfile"},
	"store/memory":   {"codec", "internal/shelf", "slab", "store", "tensor"},
	"store/files":    {"codec", "internal/shelf", "store", "tensor", "tensorfile"},
	"store/folder":   {"codec", "internal/shelf", "store", "store/files", "tensor", "tensorfile"},

	"engine/cpu":         {"engine", "engine/blocks", "engine/builtin", "engine/stack", "slab", "tensor"},
	"engine/worker":      {"engine", "engine/blocks", "internal/link", "internal/proc", "slab", "tensor"},
	"engine/cuda":        {"engine", "engine/blocks", "engine/builtin", "engine/cuda/kernels", "engine/stack", "slab", "tensor"},
	"internal/lane":      {"codec", "frame", "tensor"},
	"internal/wire":      {"api/tensorferry/v1", "frame", "reason", "slab", "tensor"},
	"internal/inbound":   {"internal/wire"},
	"store/storetest":    {"codec", "store", "tensor", "tensorfile"},
	"internal/lifecycle": {"frame", "internal/invariants"},
	"terms":              {"assembler", "codec", "frame", "reason", "tensor"},
	"internal/flow":      {"assembler", "chunker", "frame", "tensor", "terms"},
	"stream":             {"assembler", "chunker", "codec", "frame", "internal/flow", "internal/lifecycle", "internal/recent", "reason", "tensor", "terms"},

	"internal/session": {"assembler", "codec", "frame", "internal/background", "internal/fault", "slab", "stream", "tensor"},

	"internal/lanes":         {"frame", "internal/lane", "internal/session", "stream", "tensor"},
	"internal/calling":       {"codec", "frame", "internal/glob", "internal/lanes", "internal/session", "reason", "slab", "stream", "tensor"},
	"client/retry":           {},
	"internal/bench":         {"api/tensorferry/v1", "client", "codec", "internal/proc", "slab", "tensor"},
	"client":                 {"api/tensorferry/v1", "client/retry", "codec", "frame", "internal/calling", "internal/glob", "internal/lane", "internal/lanes", "internal/session", "internal/wire", "reason", "slab", "stream", "tensor"},
	"internal/link/linktest": {"internal/link"},
	"internal/relay":         {"client", "client/retry", "identity", "internal/link", "slab", "tensor"},
	"internal/failures":      {"engine", "frame", "internal/admission", "reason", "slab", "tensor", "terms"},
	"internal/serving":       {"codec", "engine", "frame", "internal/admission", "internal/failures", "internal/metrics", "internal/session", "reason", "slab", "stream", "tensor", "terms"},

	"internal/conns":   {"frame", "internal/admission", "internal/inbound", "internal/lane", "internal/link", "internal/session", "internal/wire"},
	"internal/storing": {"codec", "engine", "frame", "internal/admission", "internal/background", "internal/failures", "internal/fault", "internal/glob", "internal/serving", "internal/session", "reason", "slab", "store", "stream", "tensor", "terms"},

	"server": {"api/tensorferry/v1", "codec", "engine", "frame", "identity", "internal/admission", "internal/conns", "internal/failures", "internal/inbound", "internal/metrics", "internal/serving", "internal/session", "internal/storing", "internal/wire", "reason", "slab", "store", "stream", "tensor", "terms"},

	"compat/kpu":        {"api/kpu/torch/server", "engine", "frame", "internal/background", "internal/torchsave", "reason", "server", "slab", "tensor", "terms"},
	"compat/splitlearn": {"api/splitlearn/comm", "engine", "frame", "internal/background", "internal/elements", "internal/proc", "server", "tensor", "terms"},

	"internal/cli/display":  {"tensor"},
	"internal/cli/fail":     {"client", "internal/cli/display", "reason"},
	"internal/cli/files":    {"client", "internal/cli/display", "internal/cli/fail", "internal/torchsave", "tensor", "tensorfile"},
	"internal/cli/settings": {"internal/cli/display", "internal/cli/fail"},
	"internal/cli/moving":   {"client", "client/retry", "codec", "identity", "internal/cli/display", "internal/cli/fail", "internal/cli/files", "internal/glob", "reason", "store", "tensor", "tensorfile"},
	"internal/cli/looking":  {"client", "codec", "engine", "internal/cli/display", "internal/cli/fail", "internal/cli/files", "internal/cli/moving", "internal/elements", "reason", "tensor", "tensorfile"},
	"internal/cli/serve":    {anything},
	"internal/cli/demo":     {anything},
	"internal/cli/verbs":    {anything},

	"cmd/tensorferry":       {anything},
	"examples/encoder":      {anything},
	"examples/local":        {anything},
	"examples/pull":         {anything},
	"examples/loop":         {anything},
	"examples/relu":         {anything},
	"examples/row_function": {anything},
}

func TestImportsPointDown(t *testing.T) {
	used := make(map[[2]string]bool)
	for _, f := range source(t) {
		allowed, listed := layers[f.pkg]
		if !listed {
			t.Errorf("%s: package %q is not on the map; give it a place in layers", f.path, f.pkg)
			continue
		}
		if f.test || slices.Contains(allowed, anything) {
			continue
		}
		ours, _ := f.imports()
		for _, dep := range ours {
			used[[2]string{f.pkg, dep}] = true
			if !slices.Contains(allowed, dep) {
				t.Errorf("%s imports %s; allowed: %v", f.path, dep, allowed)
			}
		}
	}
	for pkg, deps := range layers {
		for _, dep := range deps {
			if dep != anything && !used[[2]string{pkg, dep}] {
				t.Errorf("%s does not import %s; take the arrow off the map", pkg, dep)
			}
		}
	}
}

func TestTheMapHasNoCycle(t *testing.T) {
	for pkg, deps := range layers {
		for _, dep := range deps {
			if _, listed := layers[dep]; !listed && dep != anything {
				t.Fatalf("%s may import %s, which is not on the map", pkg, dep)
			}
		}
	}
	if levels() == nil {
		t.Error("the map leads in a circle")
	}
}

// apart lists what a package must not reach, through whatever it imports.
var apart = []struct{ pkg, from, why string }{
	{"client", "internal/inbound", "a client compiles no flood control"},
	{"client", "engine", "a client computes nothing"},
	{"internal/conns", "engine", "what accepts connections compiles no engine"},
}

func TestWhatIsApartIsNotReached(t *testing.T) {
	var reach func(pkg, dep string) bool
	reach = func(pkg, dep string) bool {
		return pkg == dep || slices.ContainsFunc(layers[pkg], func(next string) bool { return reach(next, dep) })
	}
	for _, a := range apart {
		if reach(a.pkg, a.from) {
			t.Errorf("%s reaches %s: %s", a.pkg, a.from, a.why)
		}
	}
}

// levels returns how high each package stands, above all it may import; nil when the
// map leads in a circle.
func levels() map[string]int {
	level := map[string]int{}
	for range layers {
		changed := false
		for pkg, deps := range layers {
			for _, dep := range deps {
				if level[pkg] <= level[dep] {
					level[pkg], changed = level[dep]+1, true
				}
			}
			if slices.Contains(deps, anything) && level[pkg] < len(layers) {
				level[pkg] = len(layers)
			}
		}
		if !changed {
			return level
		}
	}
	return nil
}

// rules say which packages or files alone may import something from outside the
// module. Tests may import what they need.
var rules = []struct {
	what string // an import path, and all below it when it ends in "/..."
	only []string
	why  string
}{
	{"C", []string{"engine/cuda", "engine/cuda/fakecuda"}, "the module builds without cgo; one package calls into C, and the driver of its tests"},
	{
		"google.golang.org/grpc/...",
		[]string{"api/...", "identity", "internal/conns", "internal/wire", "internal/session", "internal/attack", "internal/testkit", "internal/bench", "internal/cli/...", "internal/calling", "client", "server", "compat/..."},
		"what lies below the wire does not know how bytes travel",
	},
	{
		"google.golang.org/grpc/codes",
		[]string{"api/...", "server/status.go", "client/...", "internal/calling", "compat/...", "internal/cli/..."},
		"errors meet gRPC's codes in one file; a client's error shows its code to the caller",
	},
	{
		"google.golang.org/grpc/status",
		[]string{"api/...", "server/status.go", "client/status.go", "internal/calling/status.go", "compat/...", "internal/cli/..."},
		"errors become a gRPC status in one file",
	},
	{
		"github.com/prometheus/procfs",
		[]string{"compat/splitlearn", "internal/proc"},
		"the system is asked by few",
	},
	{
		"github.com/prometheus/client_golang/...",
		[]string{"internal/metrics", "server"},
		"every metric is declared in one package; a server counts, and says where it registers",
	},
	{
		"github.com/grpc-ecosystem/...",
		[]string{"server/intercept.go"},
		"what every RPC goes through is in one file",
	},
	{"github.com/spf13/cobra/...", []string{"internal/cli/verbs"}, "one package makes commands; what they do is called like any other function"},
	{"github.com/pierrec/lz4/...", []string{"codec"}, "one package knows how payloads are compressed, and bounds what that takes"},
	{"math/rand", nil, "use math/rand/v2; in tests testkit.Rand"},
	{"github.com/golang/protobuf/...", nil, "use google.golang.org/protobuf"},
	{"testing/...", []string{"internal/testkit", "engine/enginetest", "engine/cuda/fakecuda", "internal/link/linktest", "store/storetest"}, "programs do not carry the test framework"},
	{"github.com/stretchr/...", []string{"engine/enginetest", "engine/cuda/fakecuda", "internal/link/linktest", "store/storetest"}, "programs do not carry the test framework"},
	{"pgregory.net/...", []string{"store/storetest"}, "programs do not carry the test framework"},
	{"go.uber.org/goleak/...", []string{"internal/testkit"}, "leak checks are testkit.Start"},
}

func TestOutsidePackagesAreImportedWhereTheyBelong(t *testing.T) {
	for _, f := range source(t) {
		if f.test {
			continue
		}
		_, others := f.imports()
		for _, path := range others {
			for _, r := range rules {
				if within(path, r.what) && !within(f.pkg, r.only...) && !within(f.path, r.only...) {
					t.Errorf("%s imports %s: %s; allowed in %v", f.path, path, r.why, r.only)
				}
			}
		}
	}
}

// pure packages have neither I/O nor a clock, so that a test or a fuzzer runs
// them exactly as a server does.
var (
	pure   = []string{"tensor", "slab", "codec", "reason", "frame", "chunker", "assembler", "internal/lifecycle", "terms", "internal/flow", "stream"}
	impure = []string{"net/...", "os/...", "log/...", "time"}
)

func TestPurePackagesHaveNoIOAndNoClock(t *testing.T) {
	for _, f := range source(t) {
		if f.test || !slices.Contains(pure, f.pkg) {
			continue
		}
		_, others := f.imports()
		for _, path := range others {
			if within(path, impure...) {
				t.Errorf("%s imports %s; a pure package imports none of %v", f.path, path, impure)
			}
		}
	}
}

func TestOnlyTestsImportTestkit(t *testing.T) {
	for _, f := range source(t) {
		ours, _ := f.imports()
		if !f.test && slices.Contains(ours, "internal/testkit") {
			t.Errorf("%s is no test and imports internal/testkit", f.path)
		}
	}
}

func TestPackagesStaySmall(t *testing.T) {
	lines := map[string]int{}
	for _, f := range source(t) {
		if f.test || strings.HasSuffix(f.path, ".pb.go") {
			continue
		}
		n := linesIn(t, filepath.Join(root, f.path))
		if f.pkg == "internal/cli/verbs" && n > 150 {
			t.Errorf("%s has %d lines; a verb is flags and one call, in 150", f.path, n)
		}
		lines[f.pkg] += n
	}
	for pkg, n := range lines {
		most := 2000
		if pkg == "cmd/tensorferry" {
			most = 400
		}
		if n > most {
			t.Errorf("%s has %d lines, and may have %d", pkg, n, most)
		}
	}
}
