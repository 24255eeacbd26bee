package house

import (
	"flag"
	"fmt"
	"go/doc"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var rewrite = flag.Bool("rewrite", false, "write the table of docs/packages.md, and lower ceiling.txt")

const (
	packagesPage = "docs/packages.md"
	tableBegin   = "<!-- begin: make packages -->\n"
	tableEnd     = "<!-- end -->\n"
	// linesUnit is what sizes are rounded up to, so that the page changes rarely.
	linesUnit = 100
)

// TestThePageOfPackagesIsWhatTheModuleIs holds the table of the page to the package
// comments, the sizes and the map of imports.
func TestThePageOfPackagesIsWhatTheModuleIs(t *testing.T) {
	path := filepath.Join(root, packagesPage)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(text), tableBegin)
	table, after, end := strings.Cut(rest, tableEnd)
	if !ok || !end {
		t.Fatalf("%s has no table between %q and %q", packagesPage, tableBegin, tableEnd)
	}
	want := packageTable(t)
	if *rewrite {
		if err := os.WriteFile(path, []byte(before+tableBegin+want+tableEnd+after), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	if table != want {
		t.Errorf("the table of %s is not what the module is; `make packages` writes it:\n%s", packagesPage, want)
	}
}

// packageTable has a row for each package, the lowest first.
func packageTable(t *testing.T) string {
	sentence, lines := make(map[string]string), make(map[string]int)
	for _, f := range source(t) {
		if f.test {
			continue
		}
		if s := doc.Synopsis(f.ast.Doc.Text()); s != "" { //nolint:staticcheck // the method needs the whole package
			sentence[f.pkg] = s
		}
		if !strings.HasSuffix(f.path, ".pb.go") {
			text, err := os.ReadFile(filepath.Join(root, f.path))
			if err != nil {
				t.Fatal(err)
			}
			lines[f.pkg] += strings.Count(string(text), "\n")
		}
	}
	level := levels()
	names := slices.SortedFunc(maps.Keys(layers), func(a, b string) int {
		if level[a] != level[b] {
			return level[a] - level[b]
		}
		return strings.Compare(a, b)
	})
	var b strings.Builder
	b.WriteString("\n| package | what it does | lines | imports |\n|---|---|---|---|\n")
	for _, pkg := range names {
		if lines[pkg] == 0 && sentence[pkg] == "" {
			continue // generated, or tests alone
		}
		_, what, found := strings.Cut(sentence[pkg], " "+filepath.Base(pkg)+" ")
		if !found {
			what = sentence[pkg]
		}
		fmt.Fprintf(&b, "| `%s` | %s | %d | %s |\n", pkg, what, (lines[pkg]+linesUnit-1)/linesUnit*linesUnit, arrows(layers[pkg]))
	}
	return b.String() + "\n"
}

func arrows(deps []string) string {
	if len(deps) == 0 {
		return "–"
	}
	return strings.Join(deps, ", ")
}
