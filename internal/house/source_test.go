// Package house holds the rules of this module that a compiler does not: who
// may import whom, what a comment has to say, how a test has to begin. They are
// tests over the source text, all of it, whatever its build tags. It refuses to
// hold anything but tests.
package house

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
)

const module = "github.com/tensorferry/tensorferry"

// root is the module's folder, seen from this package.
const root = "../.."

// file is one parsed Go file.
type file struct {
	path string // from the module's root, with slashes
	pkg  string // its folder, the import path within the module; "" is the root
	test bool
	ast  *ast.File
	fset *token.FileSet
}

// imports returns the paths the file imports, those of this module without it.
func (f *file) imports() (ours, others []string) {
	for _, spec := range f.ast.Imports {
		path, _ := strconv.Unquote(spec.Path.Value)
		if in, ok := strings.CutPrefix(path, module+"/"); ok {
			ours = append(ours, in)
		} else {
			others = append(others, path)
		}
	}
	return ours, others
}

// at says where n is.
func (f *file) at(n ast.Node) string {
	return f.path + ":" + strconv.Itoa(f.fset.Position(n.Pos()).Line)
}

var parse = sync.OnceValues(func() (files []*file, err error) {
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() {
			if path == root {
				return nil
			}
			_, err := os.Stat(filepath.Join(path, "go.mod"))
			if err == nil || name == "testdata" || strings.HasPrefix(name, ".") || strings.HasPrefix(name, "_") {
				return fs.SkipDir // another module, or nothing that is built
			}
			return nil
		}
		if !strings.HasSuffix(name, ".go") {
			return nil
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		f := &file{path: filepath.ToSlash(rel), test: strings.HasSuffix(name, "_test.go"), fset: token.NewFileSet()}
		if i := strings.LastIndexByte(f.path, '/'); i >= 0 {
			f.pkg = f.path[:i]
		}
		f.ast, err = parser.ParseFile(f.fset, path, nil, parser.ParseComments|parser.SkipObjectResolution)
		files = append(files, f)
		return err
	})
	return files, err
})

// source returns every Go file of the module.
func source(t *testing.T) []*file {
	t.Helper()
	files, err := parse()
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 20 {
		t.Fatalf("found %d Go files below %s: this is not the module", len(files), root)
	}
	return files
}

// within reports whether pkg is one of the folders or lies below one that ends
// in "/...".
func within(pkg string, folders ...string) bool {
	for _, folder := range folders {
		if above, tree := strings.CutSuffix(folder, "/..."); pkg == folder || tree && (pkg == above || strings.HasPrefix(pkg, above+"/")) {
			return true
		}
	}
	return false
}
