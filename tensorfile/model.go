package tensorfile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	// MetadataName is the key of a .safetensors header under which metadata is. No tensor
	// of a file can have this name, so a Document is stored beside the tensors under it.
	MetadataName = "__metadata__"
	// FileSuffix ends the name of a .safetensors file.
	FileSuffix = ".safetensors"
	// IndexSuffix ends the name of the index of a model of several files.
	IndexSuffix = ".safetensors.index.json"
)

// Document is what a model file says beside its tensors: its metadata or, of a model of
// several files, the index and each file's metadata.
type Document struct {
	// Metadata is of a single file, whose JSON has nothing else.
	Metadata map[string]string `json:"-"`
	// Index is the base name of the index, empty for a single file, and Text what it holds.
	Index string `json:"index"`
	Text  string `json:"text"`
	// Shards are the metadata of each file, by its base name.
	Shards map[string]map[string]string `json:"shards"`

	files map[string]string // the file of each tensor, by the tensor's name
}

// Encode hands over the document as JSON, nil for one that says nothing: of a single
// file what stands under MetadataName in its header.
func (d Document) Encode() []byte {
	switch {
	case d.Index != "":
		return quote(d)
	case len(d.Metadata) > 0:
		return quote(d.Metadata)
	}
	return nil
}

// ParseDocument reads what Encode wrote. Nothing returned shares text.
func ParseDocument(text []byte) (Document, error) {
	p := newHeaderParser(text, "the metadata")
	d := Document{}
	if d.Metadata = p.texts(MetadataName); p.err == nil {
		return d, nil
	}
	d.Metadata = nil
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&d); err != nil || d.Index == "" {
		return Document{}, p.err
	}
	if !plainFile(d.Index, IndexSuffix) {
		return Document{}, fmt.Errorf("%w: safetensors: %q is not the name of an index", ErrFormat, d.Index)
	}
	var err error
	if d.files, err = parseIndex([]byte(d.Text)); err != nil {
		return Document{}, err
	}
	if !slices.Equal(filesOf(d.files), slices.Sorted(maps.Keys(d.Shards))) {
		return Document{}, fmt.Errorf("%w: safetensors: the index %s names other files than there are", ErrFormat, d.Index)
	}
	return d, nil
}

// File returns the base name of the file that holds a tensor of a model of several.
func (d Document) File(name string) (file string, ok bool) {
	file, ok = d.files[name]
	return file, ok
}

// Missing returns how many tensors of a model of several files there are beside n of them.
func (d Document) Missing(n int) int { return len(d.files) - n }

// Common copies the metadata of a single file, or those that all files have.
func (d Document) Common() map[string]string {
	if d.Index == "" {
		return maps.Clone(d.Metadata)
	}
	var common map[string]string
	for _, m := range d.Shards {
		if common == nil {
			common = maps.Clone(m)
		}
		maps.DeleteFunc(common, func(k, v string) bool {
			other, there := m[k]
			return !there || other != v
		})
	}
	return common
}

// plainFile reports whether name is a file's base name with this suffix, which is not
// all of it: never a path, an option of a command, or what a terminal obeys.
func plainFile(name, suffix string) bool {
	return strings.HasSuffix(name, suffix) && !strings.ContainsAny(name[:1], ".-") && !strings.ContainsAny(name, `/\`) &&
		utf8.ValidString(name) && !strings.ContainsFunc(name, unicode.IsControl) && filepath.IsLocal(name)
}

// parseIndex reads which file holds which tensor.
func parseIndex(text []byte) (map[string]string, error) {
	p := newHeaderParser(text, "the index")
	var files map[string]string
	p.object("the index", func(key string) {
		if key == "weight_map" {
			files = p.texts(key)
			return
		}
		var ignored json.RawMessage
		if err := p.dec.Decode(&ignored); err != nil {
			p.fail("the index is not JSON: %v", err)
		}
	})
	if p.err == nil && len(files) == 0 {
		p.fail("the index has no weight_map")
	}
	for name, file := range files {
		if !plainFile(file, FileSuffix) {
			p.fail("the index has tensor %q in %q, which is not a %s file beside it", name, file, FileSuffix)
		}
	}
	return files, p.err
}

// filesOf returns the files of an index, sorted.
func filesOf(files map[string]string) []string {
	return slices.Compact(slices.Sorted(maps.Values(files)))
}

// OpenModel opens a .safetensors file or, by the name of its index, a model of several
// files, as OpenSafetensors does. Index and files must agree about every tensor. The
// caller closes the result.
func OpenModel(path string) (*Safetensors, error) {
	if !strings.HasSuffix(path, IndexSuffix) {
		return OpenSafetensors(path)
	}
	text, files, err := readIndex(path)
	if err != nil {
		return nil, err
	}
	s := &Safetensors{
		document: Document{Index: filepath.Base(path), Text: text, Shards: map[string]map[string]string{}, files: files},
		shards:   map[string]*Safetensors{},
	}
	s.closeMap = func() (err error) {
		for _, shard := range s.shards {
			err = errors.Join(err, shard.Close())
		}
		return err
	}
	for _, file := range filesOf(files) {
		shard, err := OpenSafetensors(filepath.Join(filepath.Dir(path), file))
		if err != nil {
			return nil, errors.Join(err, s.Close())
		}
		s.shards[file] = shard
		s.document.Shards[file] = shard.Metadata()
		for _, e := range shard.entries {
			if files[e.Name] != file {
				return nil, errors.Join(fmt.Errorf("%s: %w: safetensors: tensor %q is in %s, the index says %q; write the index again, or name the files one by one",
					path, ErrFormat, e.Name, file, files[e.Name]), s.Close())
			}
			s.entries = append(s.entries, e)
		}
	}
	s.index = indexOf(s.entries)
	for name, file := range files {
		if _, there := s.index[name]; !there {
			return nil, errors.Join(fmt.Errorf("%s: %w: safetensors: tensor %q is not in %s, where the index has it", path, ErrFormat, name, file), s.Close())
		}
	}
	return s, nil
}

// PathsOf returns the paths of a model's files: the path itself and, if it is an index that
// can be read, those that it names.
func PathsOf(path string) []string {
	paths := []string{path}
	if strings.HasSuffix(path, IndexSuffix) {
		_, files, _ := readIndex(path)
		for _, file := range filesOf(files) {
			paths = append(paths, filepath.Join(filepath.Dir(path), file))
		}
	}
	return paths
}

// readIndex reads an index, and which file holds which tensor.
func readIndex(path string) (text string, files map[string]string, err error) {
	f, size, err := openFile(path)
	if err != nil {
		return "", nil, err
	}
	defer f.Close()
	if size > MaxSafetensorsHeader {
		return "", nil, fmt.Errorf("%s: %w: safetensors: index of %d bytes is over the limit of %d", path, ErrFormat, size, MaxSafetensorsHeader)
	}
	all, err := io.ReadAll(io.LimitReader(f, MaxSafetensorsHeader))
	if err != nil {
		return "", nil, fmt.Errorf("tensorfile: read %s: %w", path, err)
	}
	if files, err = parseIndex(all); err != nil {
		return "", nil, fmt.Errorf("%s: %w", path, err)
	}
	return string(all), files, nil
}

// ModelIn returns the model file in a folder: its one index or, without any, its one
// .safetensors file. The error wraps ErrNotFound, or ErrUnsupported when there are
// several.
func ModelIn(dir string) (path string, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", fmt.Errorf("tensorfile: %w", err)
	}
	for _, suffix := range []string{IndexSuffix, FileSuffix} {
		var found []string
		for _, e := range entries {
			if plainFile(e.Name(), suffix) {
				found = append(found, e.Name())
			}
		}
		switch len(found) {
		case 0:
		case 1:
			return filepath.Join(dir, found[0]), nil
		default:
			return "", fmt.Errorf("%w: the folder %s holds several *%s, such as %s and %s; name one", ErrUnsupported, dir, suffix, found[0], found[1])
		}
	}
	return "", fmt.Errorf("%w: the folder %s holds no *%s", ErrNotFound, dir, FileSuffix)
}
