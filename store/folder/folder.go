// Package folder keeps tensors in a folder, where they survive the process, and serves the
// model files that others have put there.
//
// It never turns a name into a path. Any program may use a Store, which is safe for concurrent
// use; a folder belongs to one at a time. A Store owns its files, and lends readers copies.
package folder

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/shelf"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/files"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// Config configures a Store. The zero value works.
type Config struct {
	// Log receives the files that cannot be used; nil means slog.Default().
	Log *slog.Logger
	// Limit is the maximum number of bytes in files of pushed tensors, including those
	// being written and those deleted but still being read. 0 means that only the disk
	// limits them.
	Limit int64
	// MaxTensors is the maximum number of pushed tensors. 0 means DefaultMaxTensors.
	MaxTensors int
}

// Store keeps each pushed tensor in a .safetensors file of its own, which it maps to read
// it. It neither serves nor touches other files in the folder: see OpenWithFiles. docs/store.md
// says what survives a crash. It is safe for concurrent use.
type Store struct {
	dir    string
	config Config
	lock   *os.File
	locked fs.FileInfo // identifies lock
	disk
	used, metadata atomic.Int64 // bytes of pushed files, and of their metadata; they grow under the lock of index only

	sets       sync.Mutex   // held while a set is committed and its files get their names; guards unfinished
	unfinished *manifest    // of a committed set, to be finished before the next one
	stuck      atomic.Bool  // it must be, before any change: the last attempt failed
	changes    sync.RWMutex // held, shared, during other changes, and by a set while it becomes visible; taken before locks

	// locks are held while the file of a name is replaced, deleted or mapped, so that index
	// and file agree; see lockName.
	locks [nameLocks]sync.Mutex

	index   shelf.Index[*pushed]
	writers int // guarded by index
}

// disk is what a Store does to its files. It is systemDisk, except in tests.
type disk struct {
	create    func(path string) (*os.File, error)
	allocate  func(f *os.File, n int64) error
	write     func(f *os.File, off int64, views [][]byte) error
	sync      func(f *os.File) error
	syncNames func(dir string) error
	rename    func(from, to string) error
	remove    func(path string) error
}

var systemDisk = disk{
	create:    func(path string) (*os.File, error) { return os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o644) },
	allocate:  reserveDisk,
	write:     writeViews,
	sync:      (*os.File).Sync,
	syncNames: syncFolder,
	rename:    os.Rename,
	remove:    os.Remove,
}

// pushed is a tensor with a file of its own.
type pushed struct {
	shelf.Share // of its bytes on disk: held by the folder and by each mapping
	info        store.Info
	file        string        // guarded by the name's lock, as is mapped
	mapped      *shelf.Mapped // the last mapping, perhaps already unmapped
}

func (p *pushed) About() *store.Info { return &p.info }

var (
	_ store.Sets  = (*Store)(nil)
	_ store.Meter = (*Store)(nil)
)

// OpenWithFiles opens a Store, as Open does, and serves beside it the model files that others
// have put into the folder itself, those of model.safetensors as model/…. The caller closes the
// store.
func OpenWithFiles(dir string, config Config) (store.Store, error) {
	f, err := Open(dir, config)
	if err != nil {
		return nil, err
	}
	others, err := files.Open(dir, files.Config{Log: config.Log, Flat: true, Skip: isPushedName})
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if n := others.Len(); n > 0 {
		f.config.Log.Info("model files in the folder of pushed tensors are served read-only; consider a folder of their own", slog.Int("files", n))
	}
	return files.Beside(f, others), nil
}

// Open locks the folder dir, which it creates if needed. It returns ErrLocked if
// another store has locked it. It finishes a committed set, deletes the files of unfinished
// pushes and reads the headers of the others; a damaged file is logged and left alone. The
// caller closes the store.
func Open(dir string, config Config) (*Store, error) {
	if config.Log == nil {
		config.Log = slog.Default()
	}
	config.Limit = cmp.Or(config.Limit, math.MaxInt64)
	config.MaxTensors = cmp.Or(config.MaxTensors, DefaultMaxTensors)
	if config.Limit < 0 || config.MaxTensors < 0 {
		return nil, fmt.Errorf("store: the limits of %d bytes and %d tensors must not be negative", config.Limit, config.MaxTensors)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	lock, err := lockFolder(filepath.Join(dir, lockFile))
	if err != nil {
		return nil, err
	}
	locked, err := lock.Stat()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("store: %w", err), lock.Close())
	}
	f := &Store{dir: dir, config: config, lock: lock, locked: locked, disk: systemDisk}
	// First of all checkFolder: otherwise the temporary files belong to another store.
	for _, step := range []func() error{f.checkFolder, f.readManifest, f.finish, f.load} {
		if err := step(); err != nil {
			return nil, errors.Join(err, lock.Close())
		}
	}
	return f, nil
}

// checkFolder reports, with an error that wraps ErrUnavailable, whether the folder is still the
// one that this store has locked. If the folder was replaced, another store may have locked
// the new one.
func (f *Store) checkFolder() error {
	now, err := os.Stat(filepath.Join(f.dir, lockFile))
	switch {
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: %w", store.ErrUnavailable, err)
	case err == nil && os.SameFile(f.locked, now):
		return nil
	}
	return fmt.Errorf("%w: the folder %s, or the %s in it, was removed or replaced while this store had it; restart the server", store.ErrUnavailable, f.dir, lockFile)
}

// checkUsable reports whether the store may be used.
func (f *Store) checkUsable() error {
	f.index.Lock()
	err := f.index.Closed()
	f.index.Unlock()
	return cmp.Or(err, f.checkFolder())
}

// load deletes the files of unfinished pushes and reads the headers of the others.
func (f *Store) load() error {
	entries, err := os.ReadDir(f.dir)
	tensors := map[string]*pushed{}
	for _, e := range entries {
		file := e.Name()
		if isTemp(file) && e.Type().IsRegular() {
			err = errors.Join(err, os.Remove(filepath.Join(f.dir, file)))
		}
		if !isPushedName(file) || e.IsDir() {
			continue
		}
		info, bytes, e := readPushed(f.dir, file)
		switch {
		case shelf.OutOfFiles(e):
			return fmt.Errorf("store: %w", e)
		case e != nil:
			f.config.Log.Warn("file cannot be used", slog.String("file", file), slog.Any("error", e))
		default:
			tensors[info.Name] = &pushed{info: info, file: file}
			f.charge(tensors[info.Name], bytes)
		}
	}
	f.index.Reset(tensors)
	if err != nil {
		return fmt.Errorf("store: %w", err)
	}
	return nil
}

// lockOf returns the index of the lock of a file's name, in which all digits are random.
func lockOf(file string) uint64 {
	n, _ := strconv.ParseUint(file[:8], 16, 64) // it is what fileName returns
	return n % nameLocks
}

// lockName locks the name of a pushed tensor's file until unlock is called.
func (f *Store) lockName(file string) (unlock func()) {
	lock := &f.locks[lockOf(file)]
	lock.Lock()
	return lock.Unlock
}

// Create implements Store. It reserves the disk space if the file system can, so that
// ErrFull comes before the first byte is written.
func (f *Store) Create(ctx context.Context, name string, d tensor.Desc, metadata map[string]string) (store.Writer, error) {
	size, err := shelf.CheckNew(ctx, name, d, metadata)
	if err == nil {
		err = f.checkUsable()
	}
	if err != nil {
		return nil, err
	}
	w := &writer{folder: f, size: size, pushed: &pushed{
		info: store.Info{Name: name, Desc: d.Clone(), Metadata: maps.Clone(metadata), Durable: true}, file: fileName(name),
	}}
	header, err := pushedHeader(w.pushed.info)
	if err != nil {
		return nil, err
	}
	w.header = int64(len(header))
	if err := f.reserve(w.pushed, w.header, size); err != nil {
		return nil, err
	}
	w.temp = newTemp()
	w.file, err = f.create(filepath.Join(f.dir, w.temp))
	if err == nil {
		err = f.allocate(w.file, w.header+size)
	}
	if err != nil {
		err = w.wrap("reserve space for", err)
		w.Abort()
		return nil, err
	}
	return w, nil
}

// charge counts the file and the metadata of a tensor until its last holder releases it.
func (f *Store) charge(p *pushed, bytes int64) {
	metadata := shelf.MetadataBytes(p.info.Metadata)
	f.used.Add(bytes)
	f.metadata.Add(metadata)
	p.Init(func() { f.used.Add(-bytes); f.metadata.Add(-metadata) })
}

// reserve charges a tensor of size bytes and its header, if the limits have room for it.
func (f *Store) reserve(p *pushed, header, size int64) error {
	f.index.Lock()
	defer f.index.Unlock()
	if err := f.index.Closed(); err != nil {
		return err
	}
	name := p.info.Name
	if _, known := f.index.ByName[name]; !known && len(f.index.ByName)+f.writers >= f.config.MaxTensors {
		return fmt.Errorf("%w: the limit is %d tensors; delete some", store.ErrFull, f.config.MaxTensors)
	}
	if free := f.config.Limit - f.used.Load(); header > free || size > free-header {
		return fmt.Errorf("%w: tensor %q needs %d bytes and %d for a header, %d of the limit of %d are free; delete some tensors",
			store.ErrFull, name, size, header, max(free, 0), f.config.Limit)
	}
	if n := shelf.MetadataBytes(p.info.Metadata); n > 0 && f.metadata.Load()+n > allMetadata {
		return fmt.Errorf("%w: the metadata of all tensors would be longer than %d bytes; delete some, or push tensor %q with less", store.ErrFull, allMetadata, name)
	}
	f.charge(p, header+size)
	f.writers++
	return nil
}

// Open implements Store.
func (f *Store) Open(_ context.Context, name string) (store.Reader, error) {
	if err := f.checkUsable(); err != nil {
		return nil, err
	}
	defer f.lockName(fileName(name))()                           // so the file is p's
	p, err := f.index.Open(name, func(p *pushed) { p.Retain() }) // a set may replace it now
	if err != nil {
		return nil, err
	}
	if p.mapped != nil && p.mapped.TryRetain() { // by another Reader
		p.Release() // the mapping holds it
	} else if err := f.mapFile(p); err != nil {
		p.Release()
		return nil, err
	}
	return p.mapped.Open(p.info, pushedEntry, func(codec.Digest) {}) // it has one
}

// mapFile maps p's file. The mapping takes over a hold on p, unless there is an error.
func (f *Store) mapFile(p *pushed) error {
	st, err := tensorfile.OpenSafetensors(filepath.Join(f.dir, p.file))
	if errors.Is(err, fs.ErrNotExist) {
		f.config.Log.Warn("file of a pushed tensor was deleted by another program", slog.String("tensor", p.info.Name), slog.String("file", p.file))
		f.forget(p)
		return fmt.Errorf("%w: no tensor %q: its file was deleted", store.ErrNotFound, p.info.Name)
	}
	if err != nil {
		return fmt.Errorf("store: tensor %q: %w", p.info.Name, err)
	}
	p.mapped = shelf.NewMapped(st, p.Release)
	return nil
}

// forget removes a pushed tensor. The caller holds the name's lock.
func (f *Store) forget(p *pushed) {
	f.index.Lock()
	defer f.index.Unlock()
	if f.index.ByName[p.info.Name] != p { // a set has replaced it
		return
	}
	f.index.Drop(p.info.Name)
	p.Release()
}

// List implements Store.
func (f *Store) List(ctx context.Context, glob, after string, most int) ([]store.Info, error) {
	if err := f.checkUsable(); err != nil {
		return nil, err
	}
	return f.index.List(ctx, glob, after, most)
}

// Delete implements Store. One fsync makes all deletions durable.
func (f *Store) Delete(ctx context.Context, names ...string) (deleted []string, err error) {
	deleted, err = shelf.DeleteEach(ctx, names, f.delete)
	if len(deleted) == 0 {
		return nil, err
	}
	if e := f.syncNames(f.dir); e != nil {
		err = errors.Join(err, fmt.Errorf("store: %d tensors, the first of which is %q, are deleted but may come back after a power failure: %w", len(deleted), deleted[0], e))
	}
	return deleted, err
}

// delete deletes the file of a pushed tensor, if it exists.
func (f *Store) delete(name string) (existed bool, err error) {
	file := fileName(name)
	unlock, err := f.change(name, file)
	if err != nil {
		return false, err
	}
	defer unlock()
	p, known := f.index.Find(name)
	if !known {
		return false, nil
	}
	if err := f.remove(filepath.Join(f.dir, file)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, changeError(fmt.Sprintf("delete tensor %q", name), err)
	}
	f.forget(p)
	return true, nil
}

// Close implements Store. It unlocks the folder.
func (f *Store) Close() error {
	f.index.Lock()
	defer f.index.Unlock()
	if err := f.index.Close(); err != nil {
		return err
	}
	return f.lock.Close()
}

// Changed implements Sets.
func (f *Store) Changed(after int64) (names []string, now int64, known bool) {
	return f.index.Changed(after)
}

// Used implements Meter: the files of pushed tensors count, with their headers. The limit is what
// the disk has room for, if that is less.
func (f *Store) Used() (used, limit int64) {
	used, limit = f.used.Load(), f.config.Limit
	if free, known := freeDisk(f.lock); known {
		limit = min(limit, used+free)
	}
	return used, limit
}

// writer writes one tensor to a folder.
type writer struct {
	folder  *Store
	pushed  *pushed // nil after the end
	size    int64
	header  int64 // length of the header: where the tensor begins in its file
	temp    string
	file    *os.File // nil when sealed
	sealErr error    // of seal
	order   codec.OrderedDigester
	started int64 // bytes whose write-back was started
}

func (w *writer) WriteViews(ctx context.Context, off int64, views [][]byte) error {
	if err := shelf.CheckViews(ctx, off, views, w.size); err != nil {
		return err
	}
	if err := w.folder.write(w.file, w.header+off, views); err != nil {
		return w.wrap("write", err)
	}
	for _, v := range views {
		w.order.Wrote(off, v)
		off += int64(len(v))
	}
	if n := (w.order.Next() - w.started) / writeBack * writeBack; n > 0 {
		startWriteBack(w.file, w.header+w.started, n)
		w.started += n
	}
	return nil
}

// Commit makes the file durable, then its name, and only then adds it to the index.
func (w *writer) Commit(context.Context) (store.Info, error) {
	defer w.Abort()
	p, f := w.pushed, w.folder
	if err := w.seal(); err != nil {
		return store.Info{}, err
	}
	unlock, err := f.change(p.info.Name, p.file)
	if err != nil {
		return store.Info{}, err
	}
	defer unlock()
	if err := f.rename(filepath.Join(f.dir, w.temp), filepath.Join(f.dir, p.file)); err != nil {
		return store.Info{}, w.wrap("name", err)
	}
	syncErr := f.syncNames(f.dir)
	f.publish(p)
	w.pushed = nil
	if syncErr != nil { // the older tensor is gone
		return p.info.Clone(), fmt.Errorf("store: tensor %q is stored, but may not survive a power failure: %w", p.info.Name, syncErr)
	}
	return p.info.Clone(), nil
}

// publish makes what Writers have made visible, in place of older tensors.
func (f *Store) publish(made ...*pushed) {
	f.index.Lock()
	defer f.index.Unlock()
	for _, old := range f.index.Put(made...) {
		old.Release()
	}
	f.writers -= len(made)
}

func (w *writer) NameIn(s store.Store) string {
	if w.pushed == nil || s != w.folder {
		return ""
	}
	return w.pushed.info.Name
}

// seal completes the file, waits for the disk and closes the file, once.
func (w *writer) seal() error {
	if w.file != nil {
		if err := errors.Join(w.complete(), w.file.Close()); err != nil {
			w.sealErr = w.wrap("finish", err) // another fsync would succeed, although bytes are lost
		}
		w.file = nil
	}
	return w.sealErr
}

// complete writes the header and waits for the disk.
func (w *writer) complete() error {
	if err := w.order.ReadRest(io.NewSectionReader(w.file, w.header, w.size), w.size); err != nil {
		return err
	}
	info := &w.pushed.info
	info.Digest, info.Stored = w.order.Sum(), time.Now().UTC()
	header, err := pushedHeader(*info)
	if err != nil {
		return err
	}
	if err := w.folder.write(w.file, 0, [][]byte{header}); err != nil {
		return err
	}
	return w.folder.sync(w.file)
}

func (w *writer) Abort() {
	if w.pushed == nil {
		return
	}
	if w.file != nil {
		_ = w.file.Close() // its contents are discarded
	}
	_ = w.folder.remove(filepath.Join(w.folder.dir, w.temp)) // if this fails, the next Open removes it
	w.pushed.Release()
	w.pushed = nil
	w.folder.index.Lock()
	defer w.folder.index.Unlock()
	w.folder.writers--
}

// wrap returns the error of an operation, which wraps ErrFull if the disk is full.
func (w *writer) wrap(what string, err error) error {
	name, n := w.pushed.info.Name, w.header+w.size
	var errno syscall.Errno
	errors.As(err, &errno)
	if errno == syscall.ENOSPC || errno == syscall.EDQUOT || errno == syscall.EFBIG { // without the path: peers read this
		return fmt.Errorf("%w: %s tensor %q: %w for %d bytes: %w", store.ErrFull, what, name, store.ErrDiskFull, n, errno)
	}
	return changeError(fmt.Sprintf("%s tensor %q", what, name), err)
}

// changeError returns the error of a change to the folder, which wraps ErrUnwritable if other
// changes would fail, too.
func changeError(what string, err error) error {
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) || errors.Is(err, syscall.EIO) {
		return fmt.Errorf("%w: %s: %w", store.ErrUnwritable, what, err)
	}
	return fmt.Errorf("store: %s: %w", what, err)
}
