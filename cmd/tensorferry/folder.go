package main

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/tensorferry/tensorferry/tensorfile"
)

// isFolder reports whether an output is a folder: it ends in a slash or exists as one.
func isFolder(path string) bool {
	info, err := os.Stat(path)
	return strings.HasSuffix(path, "/") || err == nil && info.IsDir()
}

// folderTarget is a folder for a model of several files. It is complete or absent.
type folderTarget struct {
	path     string // as typed, cleaned
	temp     string // renamed to path by commit; empty if there is none
	document tensorfile.Document
	files    map[string]*target // by base name
}

// newFolderTarget checks that the folder is new or empty and can be created, before
// anything is pulled. The caller commits or abandons the target.
func newFolderTarget(path string) (*folderTarget, error) {
	t := &folderTarget{path: filepath.Clean(path), files: map[string]*target{}}
	entries, err := os.ReadDir(t.path)
	switch {
	case err == nil && len(entries) > 0:
		return nil, usage("--output %s: the folder is not empty; use a new folder or a file", path)
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return nil, t.named(err)
	}
	temp := filepath.Join(filepath.Dir(t.path), ".tensorferry-"+rand.Text())
	if err := os.Mkdir(temp, 0o777); err != nil {
		return nil, t.named(err)
	}
	t.temp = temp
	return t, nil
}

// begin begins each file of the model; it implements output.
func (t *folderTarget) begin(tensors []named) ([]*tensorWriter, error) {
	if t.document.Index == "" {
		return nil, usage("--output %s is a folder, which is only for a model of several files; name a file", t.path)
	}
	byFile := map[string][]int{}
	for i, n := range tensors {
		file, ok := t.document.File(n.name)
		if !ok {
			return nil, fmt.Errorf("--output %s: tensor %q is not in %s; use a .safetensors file as output", t.path, n.name, t.document.Index)
		}
		byFile[file] = append(byFile[file], i)
	}
	if missing := t.document.Missing(len(tensors)); missing > 0 {
		return nil, fmt.Errorf("--output %s: the selection lacks %d of the tensors of %s; select all of them, or use a .safetensors file as output", t.path, missing, t.document.Index)
	}
	writers := make([]*tensorWriter, len(tensors))
	for file, at := range byFile {
		out, err := newTarget(filepath.Join(t.temp, file), false, nil)
		if err != nil {
			return nil, err
		}
		out.path, out.metadata = filepath.Join(t.path, file), t.document.Shards[file]
		t.files[file] = out
		some := make([]named, len(at))
		for i, n := range at {
			some[i] = tensors[n]
		}
		begun, err := out.begin(some)
		if err != nil {
			return nil, err
		}
		for i, n := range at {
			writers[n] = begun[i]
		}
	}
	return writers, nil
}

// commit completes the files and renames the folder.
func (t *folderTarget) commit() error {
	for _, out := range t.files {
		if err := out.commit(); err != nil {
			return err
		}
	}
	err := os.WriteFile(filepath.Join(t.temp, t.document.Index), []byte(t.document.Text), 0o666)
	if err == nil {
		if err = os.Remove(t.path); errors.Is(err, fs.ErrNotExist) { // an empty one
			err = nil
		}
	}
	if err == nil {
		err = os.Rename(t.temp, t.path)
	}
	if err == nil {
		t.temp = ""
	}
	return t.named(err)
}

func (t *folderTarget) abandon() {
	for _, out := range t.files {
		out.abandon()
	}
	if t.temp != "" {
		_ = os.RemoveAll(t.temp)
		t.temp = ""
	}
}

// named adds the output's name to an error.
func (t *folderTarget) named(err error) error { return (&target{path: t.path}).named(err) }
