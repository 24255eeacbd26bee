package house

import (
	"go/ast"
	"go/token"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// sentinels returns the exported errors of the module, as package.Name.
func sentinels(t *testing.T) map[string]bool {
	t.Helper()
	found := map[string]bool{}
	for _, f := range source(t) {
		if f.test {
			continue
		}
		for _, d := range f.ast.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.VAR {
				continue
			}
			for _, s := range g.Specs {
				for _, name := range s.(*ast.ValueSpec).Names {
					if strings.HasPrefix(name.Name, "Err") {
						found[path.Base(f.pkg)+"."+name.Name] = true
					}
				}
			}
		}
	}
	return found
}

func TestEveryExportedErrorIsInTheTable(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "docs/errors.md"))
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z]+\\.Err[A-Za-z]+)` \\|.*\\|.*\\|.*\\|$").FindAllStringSubmatch(string(text), -1) {
		rows[m[1]] = true
	}
	known := sentinels(t)
	if len(known) < 20 {
		t.Fatalf("found only %d errors: the source has changed its form", len(known))
	}
	for name := range known {
		if !rows[name] {
			t.Errorf("docs/errors.md has no row for %s: code, retry, what to do", name)
		}
	}
	for name := range rows {
		if !known[name] {
			t.Errorf("docs/errors.md has a row for %s, which does not exist", name)
		}
	}
}
