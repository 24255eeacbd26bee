package house

import (
	"go/ast"
	"slices"
	"strings"
	"testing"
)

// started are the packages whose tests start goroutines.
var started = []string{"server", "client", "internal/wire", "internal/session", "compat/splitlearn"}

func TestEveryTestOfTheEdgesStartsTestkit(t *testing.T) {
	for _, f := range source(t) {
		if !f.test || !slices.Contains(started, f.pkg) {
			continue
		}
		for _, decl := range f.ast.Decls {
			fn, ok := decl.(*ast.FuncDecl)
			if !ok || fn.Recv != nil || !strings.HasPrefix(fn.Name.Name, "Test") || fn.Name.Name == "TestMain" {
				continue
			}
			if len(fn.Body.List) == 0 || !isCall(fn.Body.List[0], "testkit", "Start") {
				t.Errorf("%s: %s does not begin with testkit.Start(t)", f.at(fn), fn.Name.Name)
			}
		}
	}
}

func TestNoTestSleeps(t *testing.T) {
	for _, f := range source(t) {
		_, others := f.imports()
		if !f.test || slices.Contains(others, "testing/synctest") {
			continue // in a bubble of synctest, sleeping is how time passes
		}
		ast.Inspect(f.ast, func(n ast.Node) bool {
			if isCall(n, "time", "Sleep") {
				t.Errorf("%s sleeps; wait with testkit.Eventually or a channel, or in a bubble of testing/synctest", f.at(n))
			}
			return true
		})
	}
}

func TestNoTestStartsAProgramThatOutlivesIt(t *testing.T) {
	for _, f := range source(t) {
		ast.Inspect(f.ast, func(n ast.Node) bool {
			if sel, ok := n.(*ast.SelectorExpr); f.test && ok && sel.Sel.Name == "Command" {
				if id, ok := sel.X.(*ast.Ident); ok && id.Name == "exec" {
					t.Errorf("%s starts a program without a context; use exec.CommandContext", f.at(n))
				}
			}
			return true
		})
	}
}

// isCall reports whether n is the statement pkg.name(…).
func isCall(n ast.Node, pkg, name string) bool {
	stmt, ok := n.(*ast.ExprStmt)
	if !ok {
		return false
	}
	call, ok := stmt.X.(*ast.CallExpr)
	if !ok {
		return false
	}
	sel, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	id, ok := sel.X.(*ast.Ident)
	return ok && id.Name == pkg && sel.Sel.Name == name
}
