package house

import (
	"slices"
	"testing"
)

// anything stands for every package of the module: at the rim, where all is
// wired together.
const anything = "anything"

// The groups of packages that the edges may use.
var (
	values  = []string{"tensor", "slab", "codec", "internal/invariants"}
	core    = append([]string{"frame", "chunker", "assembler", "stream"}, values...)
	carrier = append([]string{"api/tensorferry/v1", "internal/wire", "internal/session", "internal/transfer"}, core...)
	serving = append([]string{"engine", "store", "tensorfile", "internal/metrics", "internal/fault"}, carrier...)
)

// layers is the arrow diagram of the module: who may import whom. Every package
// is on it; one without an entry fails the test.
var layers = map[string][]string{
	"tensor":              {},
	"api/tensorferry/v1":  {},
	"internal/invariants": {},
	"internal/fault":      {},
	"internal/metrics":    {},
	"internal/minifloat":  {"tensor"},
	"internal/summary":    {"tensor", "internal/minifloat"},

	"slab":       {"internal/invariants"},
	"tensorfile": {"tensor"},
	"codec":      {"tensor", "slab"},
	"chunker":    {"tensor", "slab"},
	"assembler":  {"tensor", "slab", "codec", "internal/invariants"},
	"store":      {"tensor", "slab", "codec", "tensorfile", "internal/invariants", "internal/fault", "internal/minifloat"},

	"store/storetest": {"store", "tensor", "codec"},

	"engine":            {"tensor", "slab"},
	"engine/enginetest": {"engine", "tensor", "slab"},
	"engine/cpu":        {"engine", "tensor", "slab", "tensorfile"},
	"engine/cuda":       {"engine", "tensor", "slab", "tensorfile"},
	"engine/worker":     {"engine", "tensor", "slab", "tensorfile"},

	"frame":             {"tensor", "codec"},
	"stream":            {"tensor", "frame", "chunker", "assembler", "codec"},
	"internal/wire":     {"api/tensorferry/v1", "tensor", "codec", "frame"},
	"internal/transfer": {"tensor", "codec", "frame", "assembler", "internal/fault", "internal/wire"},
	"internal/session":  append([]string{"api/tensorferry/v1", "internal/wire"}, core...),

	"client":            carrier,
	"server":            serving,
	"compat/kpu":        serving,
	"compat/splitlearn": serving,

	"internal/bench":        {anything},
	"internal/stress":       {anything},
	"cmd/tensorferry":       {anything},
	"examples/bottom_model": {anything},
	"examples/duplex":       {anything},
	"examples/pull":         {anything},
	"examples/row_function": {anything},
	"examples/fashion":      {"tensor", "tensorfile"}, // the data of the demo, not a program

	"internal/testkit": {"slab"},
	"internal/house":   {},
}

func TestImportsPointDown(t *testing.T) {
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
			if !slices.Contains(allowed, dep) {
				t.Errorf("%s imports %s; allowed: %v", f.path, dep, allowed)
			}
		}
	}
}

func TestTheMapHasNoCycle(t *testing.T) {
	// Levels settle when no arrow leads back: a package stands above all it may import.
	level := map[string]int{}
	for range layers {
		changed := false
		for pkg, deps := range layers {
			for _, dep := range deps {
				if _, listed := layers[dep]; !listed && dep != anything {
					t.Fatalf("%s may import %s, which is not on the map", pkg, dep)
				}
				if level[pkg] <= level[dep] {
					level[pkg], changed = level[dep]+1, true
				}
			}
		}
		if !changed {
			return
		}
	}
	t.Error("the map leads in a circle")
}

// rules say which packages or files alone may import something from outside the
// module. Tests may import what they need.
var rules = []struct {
	what string // an import path, and all below it when it ends in "/..."
	only []string
	why  string
}{
	{"C", []string{"engine/cuda"}, "the module builds without cgo; one package calls into C"},
	{
		"google.golang.org/grpc/...",
		[]string{"api/...", "internal/wire", "internal/session", "internal/bench", "internal/stress", "client", "server", "compat/...", "cmd/..."},
		"what lies below the wire does not know how bytes travel",
	},
	{
		"google.golang.org/grpc/codes",
		[]string{"api/...", "server/status.go", "client/...", "compat/...", "internal/bench", "internal/stress", "cmd/..."},
		"errors meet gRPC's codes in one file; a client's error shows its code to the caller",
	},
	{
		"google.golang.org/grpc/status",
		[]string{"api/...", "server/status.go", "client/status.go", "compat/...", "internal/bench", "internal/stress", "cmd/..."},
		"errors become a gRPC status in one file",
	},
	{
		"github.com/prometheus/...",
		[]string{"internal/metrics", "server"},
		"every metric is declared in one package; a server counts, and says where it registers",
	},
	{
		"github.com/grpc-ecosystem/...",
		[]string{"server/intercept.go"},
		"what every RPC goes through is in one file",
	},
	{
		"github.com/knadh/...",
		[]string{"cmd/..."},
		"a library is configured by the structs of its edges",
	},
	{"github.com/pierrec/lz4/...", []string{"codec"}, "one package knows how payloads are compressed, and bounds what that takes"},
	{"math/rand", nil, "use math/rand/v2; in tests testkit.Rand"},
	{"github.com/golang/protobuf/...", nil, "use google.golang.org/protobuf"},
	{"testing/...", []string{"internal/testkit", "engine/enginetest", "store/storetest"}, "programs do not carry the test framework"},
	{"github.com/stretchr/...", []string{"store/storetest"}, "programs do not carry the test framework"},
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
	pure   = []string{"tensor", "slab", "codec", "frame", "chunker", "assembler", "stream"}
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
