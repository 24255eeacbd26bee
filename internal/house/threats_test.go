package house

import (
	"go/ast"
	"regexp"
	"strings"
	"testing"
)

// testName is a test as docs/threat-model.md writes it: `folder.TestName`.
var testName = regexp.MustCompile("`([a-z/_]+)\\.((?:Test|Fuzz)[A-Za-z0-9_]+)`")

func TestEveryThreatIsMetByATestThatExists(t *testing.T) {
	tests := map[string]bool{}
	for _, f := range source(t) {
		if !f.test {
			continue
		}
		for _, decl := range f.ast.Decls {
			if fn, ok := decl.(*ast.FuncDecl); ok && fn.Recv == nil {
				tests[f.pkg+"."+fn.Name.Name] = true
			}
		}
	}
	met, threats := false, 0
	for line := range strings.Lines(page(t, "docs/threat-model.md")) {
		named := testName.FindAllStringSubmatch(line, -1)
		for _, m := range named {
			if name := m[1] + "." + m[2]; !tests[name] {
				t.Errorf("docs/threat-model.md names %s, which does not exist", name)
			}
		}
		switch {
		case strings.HasPrefix(line, "#"):
			met = false
		case strings.HasSuffix(line, "| test |\n"):
			met = true
		case met && strings.HasPrefix(line, "| "):
			threats++
			if len(named) == 0 {
				t.Errorf("docs/threat-model.md names no test in: %s", line)
			}
		}
	}
	if threats < 20 {
		t.Errorf("found %d threats: the page has changed its form", threats)
	}
}
