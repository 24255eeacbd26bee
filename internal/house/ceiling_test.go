package house

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const (
	ceilingFile = "internal/house/ceiling.txt"
	program     = "./cmd/tensorferry"
)

var (
	verbHeading = regexp.MustCompile(`(?m)^## ([a-z]+)\n`)
	serveFlags  = regexp.MustCompile(`(?ms)^## serve$.*?\n(## |\z)`)
	flagLine    = regexp.MustCompile(`(?m)^ +(?:-[a-z], )?--([a-z-]+)`)
	// notSettings are the flags of serve that say where settings are, or are about the command.
	notSettings = []string{"config", "print-config", "help", "verbose"}
)

// counts are what ceiling.txt limits, in its order. Tests and generated code are never
// counted.
var counts = []struct {
	name string
	of   func(*testing.T) int
}{
	{"lines of Go in the program", shippedLines},
	{"lines of Go in all modules", func(t *testing.T) int {
		return linesOf(t, func(path string) bool { return strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") })
	}},
	{"lines of Python", func(t *testing.T) int {
		return linesOf(t, func(path string) bool { return strings.HasSuffix(path, ".py") && !strings.Contains(path, "/tests/") })
	}},
	{"packages", func(t *testing.T) int { return len(layers) }},
	{"commands", func(t *testing.T) int { return len(verbHeading.FindAllString(commandsPage(t), -1)) }},
	{"settings of serve", settings},
	{"constants in limits.go", limitConstants},
	{"words of README and docs", words},
	{"MB of the program", programSize},
}

// unmeasured is what is not counted in this build.
const unmeasured = -1

// TestTheHouseIsNotAboveItsCeiling holds the size of the project to ceiling.txt. Its numbers
// fall with what they count and never rise, but for what a change set out to add.
func TestTheHouseIsNotAboveItsCeiling(t *testing.T) {
	path := filepath.Join(root, ceilingFile)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	ceiling := map[string]int{}
	for line := range strings.Lines(string(text)) {
		var n int
		if _, err := fmt.Sscan(line, &n); err != nil {
			t.Fatalf("%s: %q has no number", ceilingFile, line)
		}
		_, name, _ := strings.Cut(strings.TrimSpace(line), " ")
		ceiling[name] = n
	}
	var lower bytes.Buffer
	for _, c := range counts {
		limit := ceiling[c.name]
		n := c.of(t)
		if n == unmeasured {
			n = limit
		}
		if n > limit {
			t.Errorf("%d %s; %s allows %d: take away as much as you add", n, c.name, ceilingFile, limit)
		}
		fmt.Fprintf(&lower, "%d %s\n", min(n, limit), c.name)
	}
	if *rewrite {
		if err := os.WriteFile(path, lower.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// shippedLines counts the packages of this module that are linked into the program on Linux
// with cgo, so that the count is the same wherever the test runs.
func shippedLines(t *testing.T) int {
	cmd := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f",
		`{{with .Module}}{{if .Main}}{{$.Dir}}{{range $.GoFiles}} {{.}}{{end}}{{range $.CgoFiles}} {{.}}{{end}}{{end}}{{end}}`, program)
	cmd.Dir, cmd.Env = root, append(os.Environ(), "GOOS=linux", "GOARCH=amd64", "CGO_ENABLED=1")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v", cmd, err)
	}
	lines := 0
	for pkg := range strings.Lines(string(out)) {
		words := strings.Fields(pkg)
		for _, name := range words[min(1, len(words)):] {
			if !strings.HasSuffix(name, ".pb.go") {
				lines += linesIn(t, filepath.Join(words[0], name))
			}
		}
	}
	return lines
}

// linesOf counts the lines of the files of all modules, but of testdata.
func linesOf(t *testing.T, counted func(path string) bool) (lines int) {
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch name := d.Name(); {
		case err != nil:
			return err
		case d.IsDir() && path != root && (strings.HasPrefix(name, ".") || name == "testdata" || name == "build" || name == "dist"):
			return fs.SkipDir
		case !d.IsDir() && counted(filepath.ToSlash(path)) && !strings.HasSuffix(name, ".pb.go"):
			lines += linesIn(t, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

func linesIn(t *testing.T, path string) int {
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Count(text, []byte("\n"))
}

func commandsPage(t *testing.T) string {
	return pages(t)[filepath.Join(root, "docs/commands.md")]
}

func settings(t *testing.T) (n int) {
	for _, flag := range flagLine.FindAllStringSubmatch(serveFlags.FindString(commandsPage(t)), -1) {
		if !slices.Contains(notSettings, flag[1]) {
			n++
		}
	}
	return n
}

// limitConstants counts what limits.go of each package of the product declares.
func limitConstants(t *testing.T) (n int) {
	for _, f := range source(t) {
		if filepath.Base(f.path) != "limits.go" || within(f.pkg, "internal/bench", "internal/roads") {
			continue
		}
		for _, decl := range f.ast.Decls {
			if d, ok := decl.(*ast.GenDecl); ok && d.Tok == token.CONST {
				for _, spec := range d.Specs {
					n += len(spec.(*ast.ValueSpec).Names)
				}
			}
		}
	}
	return n
}

func words(t *testing.T) (n int) {
	for path, text := range pages(t) {
		if path == filepath.Join(root, "README.md") || strings.HasPrefix(path, filepath.Join(root, "docs")+"/") {
			n += len(strings.Fields(text))
		}
	}
	return n
}
