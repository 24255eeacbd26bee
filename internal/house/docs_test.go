package house

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	mdCode     = regexp.MustCompile("(?s)```.*?```")
	mdLink     = regexp.MustCompile(`\]\(([^)#:\s]+)(#[^)\s]*)?\)`) // a colon is in links to other hosts
	makeWord   = regexp.MustCompile("(?m)(?:^\\s*|`)make ([a-z][a-z0-9-]*)")
	mdFile     = regexp.MustCompile("`([a-z0-9_./-]+/[a-z0-9_]+\\.(?:go|proto))`")
	makeTarget = regexp.MustCompile(`(?m)^([a-z][a-z0-9-]*):.* ## `)
)

// pages returns the text of every Markdown page by its path.
func pages(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := d.Name(); d.IsDir() && path != root && (strings.HasPrefix(name, ".") || name == "testdata") {
			return fs.SkipDir
		}
		if strings.HasSuffix(path, ".md") {
			text, err := os.ReadFile(path)
			found[path] = string(text)
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func TestEveryLinkBetweenFilesLeadsToOne(t *testing.T) {
	for path, text := range pages(t) {
		for _, m := range mdLink.FindAllStringSubmatch(mdCode.ReplaceAllString(text, ""), -1) {
			if _, err := os.Stat(filepath.Join(filepath.Dir(path), m[1])); err != nil {
				t.Errorf("%s links to %s: %v", path, m[1], err)
			}
		}
	}
}

func TestEveryFileOfTheSourceThatAPageNamesExists(t *testing.T) {
	for path, text := range pages(t) {
		for _, m := range mdFile.FindAllStringSubmatch(text, -1) {
			if _, err := os.Stat(filepath.Join(root, m[1])); err != nil {
				t.Errorf("%s names %s: %v", path, m[1], err)
			}
		}
	}
}

func TestEveryMakeTargetInThePagesExists(t *testing.T) {
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	targets := map[string]bool{}
	for _, m := range makeTarget.FindAllStringSubmatch(string(makefile), -1) {
		targets[m[1]] = true
	}
	if !targets["check"] {
		t.Fatal("no target check in the Makefile: its form has changed")
	}
	for path, text := range pages(t) {
		for _, m := range makeWord.FindAllStringSubmatch(text, -1) {
			if !targets[m[1]] {
				t.Errorf("%s says make %s; the Makefile has no such target with a ## comment", path, m[1])
			}
		}
	}
}
