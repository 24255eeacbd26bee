package store

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

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/fault"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// FilesConfig configures Files. The zero value works.
type FilesConfig struct {
	// Name is a prefix of the names of all tensors, followed by a slash. Empty means no
	// prefix.
	Name string
	// Log receives the files that cannot be used; nil means slog.Default().
	Log *slog.Logger
}

// Files serves the tensors of the model files in a folder and the folders below it: those
// of sub/model.safetensors, or of sub/model.safetensors.index.json and the files that it
// names, as sub/model/…. Files are mapped, not read. It never writes: Create fails with
// ErrReadOnly. It neither follows links to folders nor enters folders whose names begin
// with a dot. It is safe for concurrent use.
type Files struct {
	dir    string
	prefix string // prefix of all names
	flat   bool   // a Folder has the same folder: its files, and the folders below, are left out
	log    *slog.Logger
	pool   *slab.Pool // for views
	limit  int        // of tensors in all files: fileTensors, except in tests

	scanning sync.Mutex // guards scan; taken before mu
	scan     scan
	scans    atomic.Int64 // scans begun

	index[*part]
}

// OpenFiles opens the model files below the folder dir and reads their headers. The caller
// closes the store.
func OpenFiles(dir string, config FilesConfig) (*Files, error) { return openFiles(dir, config, false) }

// OpenDir opens a Folder, which is OpenFolder's, and serves beside it the model files that
// others have put into the folder itself, those of model.safetensors as model/…. The
// caller closes the store.
func OpenDir(dir string, config FolderConfig) (Store, error) {
	folder, err := OpenFolder(dir, config)
	if err != nil {
		return nil, err
	}
	files, err := openFiles(dir, FilesConfig{Log: config.Log}, true)
	if err != nil {
		return nil, errors.Join(err, folder.Close())
	}
	if n := len(files.scan.files); n > 0 {
		files.log.Info("model files in the folder of pushed tensors are served read-only; consider a folder of their own", slog.Int("files", n))
	}
	return Beside(folder, files), nil
}

func openFiles(dir string, config FilesConfig, flat bool) (*Files, error) {
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
	f := &Files{
		dir: dir, flat: flat, log: config.Log, limit: fileTensors, pool: slab.NewPool(viewBytes, slab.System),
		scan: scan{files: map[string]*wholeFile{}},
	}
	if name := strings.TrimSuffix(config.Name, "/"); name != "" {
		if err := CheckName(name); err != nil {
			return nil, err
		}
		f.prefix = name + "/"
	}
	return f, f.rescan(false)
}

// Create implements Store: it fails.
func (f *Files) Create(ctx context.Context, name string, d tensor.Desc, metadata map[string]string) (Writer, error) {
	if _, err := checkNew(ctx, name, d, metadata); err != nil {
		return nil, err
	}
	if p, taken := f.find(name); taken {
		return nil, taking(name, p.info.File)
	}
	return nil, fmt.Errorf("%w: cannot store tensor %q", ErrReadOnly, name)
}

// taking returns the error for pushing under the name of a tensor in a file.
func taking(name, file string) error {
	return fmt.Errorf("%w: %q is a tensor of the file %s in the folder; push under another name", ErrExists, name, file)
}

// partOf returns the error for deleting a tensor in a file.
func partOf(name, file string) error {
	return fmt.Errorf("%w: %q is a tensor of %s; delete that file", ErrPart, name, file)
}

// Open implements Store. If the tensor is not known, or its file has changed since it was
// seen, it scans first.
func (f *Files) Open(ctx context.Context, name string) (Reader, error) {
	r, err := f.openKnown(name, false)
	if !errors.Is(err, ErrNotFound) && !errors.Is(err, errChanged) {
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
func (f *Files) List(ctx context.Context, glob, after string, most int) ([]Info, error) {
	if err := f.rescan(false); err != nil {
		return nil, err
	}
	return f.index.List(ctx, glob, after, most)
}

// Delete implements Store. It fails for every tensor that exists.
func (f *Files) Delete(ctx context.Context, names ...string) ([]string, error) {
	return deleteEach(ctx, names, func(name string) (bool, error) {
		if p, there := f.find(name); there {
			return false, partOf(name, p.info.File)
		}
		return false, nil
	})
}

// Close implements Store.
func (f *Files) Close() error {
	f.scanning.Lock()
	defer f.scanning.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.byName, f.names = nil, nil
	for _, w := range f.scan.files {
		if w.usable() {
			w.mapped.Release()
		}
	}
	f.scan.files = nil
	return f.close()
}

// fileReader is the Reader of a tensor in a file.
type fileReader struct {
	pool  *slab.Pool
	info  Info
	data  []byte
	file  *mapped
	files *Files // that part is of
	part  *part  // nil for a pushed tensor
}

// open finds the tensor in its file, unless r already has its bytes. It takes over the
// caller's hold on the file, even if it fails.
func (r *fileReader) open(name string) (Reader, error) {
	if r.data != nil {
		return r, nil
	}
	t, err := r.file.file.Tensor(name)
	if err == nil {
		_, err = tensor.New(r.info.Desc, t.Data) // the file may have been replaced
	}
	if err != nil {
		r.file.Release()
		return nil, fmt.Errorf("store: tensor %q: its file has changed: %w", r.info.Name, err)
	}
	r.data = t.Data
	return r, nil
}

// Digested implements DigestKeeper. A part keeps its digest for as long as its file is the
// one that was read.
func (r *fileReader) Digested(d codec.Digest) {
	if r.part != nil {
		r.files.mu.Lock()
		defer r.files.mu.Unlock()
		r.part.info.Digest = d
	}
}

func (r *fileReader) Info() Info { return r.info.clone() }

// View copies: another process may truncate the file, which a reader of the mapping, such
// as gRPC, would not survive.
func (r *fileReader) View(ctx context.Context, off, n int64) ([]byte, Releaser, error) {
	if err := checkView(ctx, off, n, int64(len(r.data))); err != nil {
		return nil, nil, err
	}
	s, err := r.pool.Get(int(n))
	if err != nil {
		return nil, nil, fmt.Errorf("store: tensor %q: %w", r.info.Name, err)
	}
	if err := fault.Guard(func() { copy(s.Bytes(), r.data[off:]) }); err != nil {
		s.Release()
		return nil, nil, fmt.Errorf("store: tensor %q: %w", r.info.Name, err)
	}
	return s.Bytes(), s, nil
}

func (r *fileReader) Release() { r.file.Release() }
