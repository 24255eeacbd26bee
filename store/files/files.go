// Package files serves the tensors of model files where they are, beside a store.
//
// It never writes. Any program may use a Store, which is safe for concurrent use. The bytes
// belong to whoever keeps the files; a Store lends readers copies.
package files

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/tensorferry/tensorferry/internal/shelf"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

// Config configures a Store. The zero value works.
type Config struct {
	// Name is a prefix of the names of all tensors, followed by a slash. Empty means no
	// prefix.
	Name string
	// Log receives the files that cannot be used; nil means slog.Default().
	Log *slog.Logger
	// Flat leaves out the folders below the folder.
	Flat bool
	// Skip reports whether a file, of which it gets the base name, is left out; nil means that
	// none is.
	Skip func(name string) bool
}

// Store serves the tensors of the model files in a folder and the folders below it: those
// of sub/model.safetensors, or of sub/model.safetensors.index.json and the files that it
// names, as sub/model/…. Files are mapped, not read. It never writes: Create fails with
// ErrReadOnly. It neither follows links to folders nor enters folders whose names begin
// with a dot. It is safe for concurrent use.
type Store struct {
	dir    string
	prefix string // prefix of all names
	config Config
	limit  int // of tensors in all files: maxTensors, except in tests

	scanning sync.Mutex // guards scan; taken before the lock of index
	scan     scan
	scans    atomic.Int64 // scans begun

	index shelf.Index[*part]
}

var _ store.Store = (*Store)(nil)

// Open opens the model files below the folder dir and reads their headers. The caller
// closes the store.
func Open(dir string, config Config) (*Store, error) {
	if config.Log == nil {
		config.Log = slog.Default()
	}
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	if info, err := os.Stat(dir); err == nil && !info.IsDir() {
		return nil, fmt.Errorf("store: %s is not a folder", dir)
	}
	f := &Store{dir: dir, config: config, limit: maxTensors, scan: scan{files: map[string]*wholeFile{}}}
	if name := strings.TrimSuffix(config.Name, "/"); name != "" {
		if err := store.CheckName(name); err != nil {
			return nil, err
		}
		f.prefix = name + "/"
	}
	return f, f.rescan(false)
}

// Len returns how many files there were when the folder was last looked at, usable or not.
func (f *Store) Len() int {
	f.scanning.Lock()
	defer f.scanning.Unlock()
	return len(f.scan.files)
}

// Create implements Store: it fails.
func (f *Store) Create(ctx context.Context, name string, d tensor.Desc, metadata map[string]string) (store.Writer, error) {
	if _, err := shelf.CheckNew(ctx, name, d, metadata); err != nil {
		return nil, err
	}
	if p, taken := f.index.Find(name); taken {
		return nil, errTaken(name, p.info.File)
	}
	return nil, fmt.Errorf("%w: cannot store tensor %q", store.ErrReadOnly, name)
}

// errTaken returns the error for pushing under the name of a tensor in a file.
func errTaken(name, file string) error {
	return fmt.Errorf("%w: %q is a tensor of the file %s in the folder; push under another name", store.ErrExists, name, file)
}

// errPart returns the error for deleting a tensor in a file.
func errPart(name, file string) error {
	return fmt.Errorf("%w: %q is a tensor of %s; delete that file", store.ErrPart, name, file)
}

// Open implements Store. If the tensor is not known, or its file has changed since it was
// seen, it scans first.
func (f *Store) Open(ctx context.Context, name string) (store.Reader, error) {
	r, err := f.openKnown(name, false)
	if !errors.Is(err, store.ErrNotFound) && !errors.Is(err, errChanged) {
		return r, err
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err := f.rescan(errors.Is(err, errChanged)); err != nil {
		return nil, err
	}
	return f.openKnown(name, true)
}

// List implements Store. It first checks for new and removed files.
func (f *Store) List(ctx context.Context, glob, after string, most int) ([]store.Info, error) {
	if err := f.rescan(false); err != nil {
		return nil, err
	}
	return f.index.List(ctx, glob, after, most)
}

// Delete implements Store. It fails for every tensor that exists.
func (f *Store) Delete(ctx context.Context, names ...string) ([]string, error) {
	return shelf.DeleteEach(ctx, names, func(name string) (bool, error) {
		if p, known := f.index.Find(name); known {
			return false, errPart(name, p.info.File)
		}
		return false, nil
	})
}

// Close implements Store.
func (f *Store) Close() error {
	f.scanning.Lock()
	defer f.scanning.Unlock()
	f.index.Reset(nil)
	for _, w := range f.scan.files {
		if w.usable() {
			w.mapped.Release()
		}
	}
	f.scan.files = nil
	f.index.Lock()
	defer f.index.Unlock()
	return f.index.Close()
}
