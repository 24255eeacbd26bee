package house

import (
	"go/ast"
	"regexp"
	"slices"
	"testing"
)

// ownership matches the words that say whose bytes they are, and for how long:
// lends, shares, hands over, copies, borrows.
var ownership = regexp.MustCompile(`(?i)\b(lend|lent|shar(e|ing)|hand(s|ed|ing)? over|cop(y|ie)|borrow)`)

// settled are methods whose ownership an interface of the standard library has
// settled.
var settled = []string{
	"Read", "ReadAt", "Write", "WriteAt",
	"MarshalJSON", "UnmarshalJSON", "MarshalText", "UnmarshalText", "AppendText", "MarshalBinary", "UnmarshalBinary",
}

// programs have no importers.
var programs = []string{"cmd/...", "internal/cli/...", "examples/...", "api/...", "internal/house"}

func TestEveryFunctionThatTakesOrReturnsBytesSaysWhoOwnsThem(t *testing.T) {
	for _, f := range source(t) {
		if f.test || within(f.pkg, programs...) {
			continue
		}
		check := func(n ast.Node, name string, typ *ast.FuncType, doc *ast.CommentGroup) {
			if ast.IsExported(name) && !slices.Contains(settled, name) && carriesBytes(f, typ) && !ownership.MatchString(doc.Text()) {
				t.Errorf("%s: the comment of %s does not say who owns the bytes: lends, shares, hands over, copies or borrows", f.at(n), name)
			}
		}
		for _, decl := range f.ast.Decls {
			switch d := decl.(type) {
			case *ast.FuncDecl:
				if d.Recv == nil || exportedReceiver(d.Recv) {
					check(d, d.Name.Name, d.Type, d.Doc)
				}
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					typ, ok := spec.(*ast.TypeSpec)
					if !ok || !typ.Name.IsExported() {
						continue
					}
					if iface, ok := typ.Type.(*ast.InterfaceType); ok {
						for _, m := range iface.Methods.List {
							if fn, ok := m.Type.(*ast.FuncType); ok && len(m.Names) == 1 {
								check(m, m.Names[0].Name, fn, m.Doc)
							}
						}
					}
				}
			}
		}
	}
}

func exportedReceiver(recv *ast.FieldList) bool {
	exported := false
	ast.Inspect(recv.List[0].Type, func(n ast.Node) bool {
		if id, ok := n.(*ast.Ident); ok {
			exported = exported || id.IsExported()
		}
		return true
	})
	return exported
}

// carriesBytes reports whether a parameter or result is, or holds, a []byte or
// a tensor.Tensor. A function type among them is the caller's own.
func carriesBytes(f *file, typ *ast.FuncType) bool {
	found := false
	look := func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncType:
			return false
		case *ast.ArrayType:
			id, ok := n.Elt.(*ast.Ident)
			found = found || ok && id.Name == "byte" && n.Len == nil
		case *ast.SelectorExpr:
			pkg, ok := n.X.(*ast.Ident)
			found = found || ok && pkg.Name == "tensor" && n.Sel.Name == "Tensor"
			return false
		case *ast.Ident:
			found = found || f.pkg == "tensor" && n.Name == "Tensor"
		}
		return true
	}
	for _, list := range []*ast.FieldList{typ.Params, typ.Results} {
		if list == nil {
			continue
		}
		for _, field := range list.List {
			ast.Inspect(field.Type, look)
		}
	}
	return found
}
