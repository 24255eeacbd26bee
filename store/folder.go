package store

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"io/fs"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// FolderConfig configures a Folder. The zero value works.
type FolderConfig struct {
	// Log receives the files that cannot be used. Nil means no log.
	Log *slog.Logger
	// Limit is the maximum number of bytes in files of pushed tensors, including those
	// being written and those deleted but still being read. 0 means that only the disk
	// limits them.
	Limit int64
	// MaxTensors is the maximum number of pushed tensors. 0 means DefaultMaxTensors.
	MaxTensors int
}

// Folder keeps each pushed tensor in a .safetensors file of its own. It also serves the
// tensors of other .safetensors files put into the folder: those of model.safetensors as
// model/…. Files are mapped, not read. docs/store.md says what survives a crash. It is safe
// for concurrent use.
type Folder struct {
	dir    string
	config FolderConfig
	lock   *os.File
	locked fs.FileInfo // identifies lock
	// syncNames is syncFolder, except in tests.
	syncNames func(dir string) error
	used      atomic.Int64 // bytes of pushed files; grows under mu only

	// names are held while the file of a name is replaced, deleted or mapped, so that index
	// and file agree; see nameLock.
	names [nameLocks]sync.Mutex

	yours *files // files that others have put into the folder

	mu       sync.Mutex // guards all below; taken last
	pushed   index[*pushed]
	files    map[string]bool // the files of pushed
	writers  int
	isClosed bool
}

// pushed is a tensor with a file of its own.
type pushed struct {
	share  // of its bytes on disk: held by the folder and by each mapping
	info   Info
	file   string
	mapped *mapped // the last mapping, perhaps already unmapped; guarded by the name's lock
}

// OpenFolder locks the folder dir, which it creates if needed. It returns ErrLocked if
// another store has locked it. It deletes the files of unfinished pushes and reads the
// header of every .safetensors file; a damaged file is logged and left alone. The caller
// closes the store.
func OpenFolder(dir string, config FolderConfig) (*Folder, error) {
	if config.Log == nil {
		config.Log = slog.New(slog.DiscardHandler)
	}
	if config.Limit == 0 {
		config.Limit = math.MaxInt64
	}
	if config.MaxTensors == 0 {
		config.MaxTensors = DefaultMaxTensors
	}
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
	f := &Folder{
		dir: dir, config: config, lock: lock, locked: locked, syncNames: syncFolder,
		pushed: newIndex(map[string]*pushed{}), files: map[string]bool{}, yours: newFiles(dir, config.Log),
	}
	f.yours.owner = f
	if err = f.isHere(); err == nil { // otherwise the temporary files belong to another store
		err = f.removeTemps()
	}
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	if err := f.yours.rescan(false); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// isHere reports, with an error that wraps ErrUnavailable, whether the folder is still the
// one that this store has locked. If the folder was replaced, another store may have locked
// the new one.
func (f *Folder) isHere() error {
	now, err := os.Stat(filepath.Join(f.dir, lockFile))
	switch {
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	case err == nil && os.SameFile(f.locked, now):
		return nil
	}
	return fmt.Errorf("%w: the folder %s, or the %s in it, was removed or replaced while this store had it; restart the server", ErrUnavailable, f.dir, lockFile)
}

// usable reports whether the store may be used.
func (f *Folder) usable() error {
	f.mu.Lock()
	closed := f.isClosed
	f.mu.Unlock()
	if closed {
		return ErrClosed
	}
	return f.isHere()
}

// removeTemps deletes the files of unfinished pushes.
func (f *Folder) removeTemps() error {
	entries, err := os.ReadDir(f.dir)
	for _, e := range entries {
		if name := e.Name(); e.Type().IsRegular() && strings.HasPrefix(name, tempPrefix) && strings.HasSuffix(name, tempSuffix) {
			err = errors.Join(err, os.Remove(filepath.Join(f.dir, name)))
		}
	}
	if err != nil {
		return fmt.Errorf("store: delete files of unfinished pushes: %w", err)
	}
	return nil
}

var nameSeed = maphash.MakeSeed()

// nameLock returns the lock of a pushed tensor's file.
func (f *Folder) nameLock(file string) *sync.Mutex {
	return &f.names[maphash.String(nameSeed, file)%nameLocks]
}

// Create implements Store. It reserves the disk space if the file system can, so that
// ErrFull comes before the first byte is written.
func (f *Folder) Create(ctx context.Context, name string, d tensor.Desc) (Writer, error) {
	size, err := checkNew(ctx, name, d)
	if err == nil {
		err = f.usable()
	}
	if err != nil {
		return nil, err
	}
	w := &folderWriter{folder: f, size: size, made: &pushed{
		info: Info{Name: name, Desc: d.Clone(), Durable: true},
		file: fileName(name),
	}}
	header, err := pushedHeader(w.made.info)
	if err != nil {
		return nil, err
	}
	w.begin = int64(len(header))
	err = f.reserve(name, w.begin, size)
	if errors.Is(err, errChanged) {
		if err = f.yours.rescan(true); err == nil {
			err = f.reserve(name, w.begin, size)
		}
	}
	if err != nil {
		return nil, err
	}
	w.made.init(func() { f.used.Add(-w.begin - size) })
	w.temp = filepath.Join(f.dir, tempPrefix+rand.Text()+tempSuffix)
	w.file, err = os.OpenFile(w.temp, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o644)
	if err == nil {
		err = reserveDisk(w.file, w.begin+size)
	}
	if err != nil {
		err = w.failed("reserve space for", err)
		w.Abort()
		return nil, err
	}
	return w, nil
}

// reserve charges a tensor of size bytes, and its header, to the limits.
func (f *Folder) reserve(name string, header, size int64) error {
	p, taken := f.yours.find(name)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.isClosed {
		return ErrClosed
	}
	_, known := f.pushed.byName[name]
	if taken && !known {
		if !p.whole.asItWas() {
			return fmt.Errorf("%w: %w: %s", ErrExists, errChanged, p.info.File)
		}
		return taking(p.info)
	}
	if !known && len(f.pushed.names)+f.writers >= f.config.MaxTensors {
		return fmt.Errorf("%w: the limit is %d tensors; delete some", ErrFull, f.config.MaxTensors)
	}
	if free := f.config.Limit - f.used.Load(); header > free || size > free-header {
		return fmt.Errorf("%w: tensor %q needs %d bytes and %d for a header, %d of the limit of %d are free; delete some tensors",
			ErrFull, name, size, header, max(free, 0), f.config.Limit)
	}
	f.used.Add(header + size)
	f.writers++
	return nil
}

// Open implements Store.
func (f *Folder) Open(ctx context.Context, name string) (Reader, error) {
	if err := f.usable(); err != nil {
		return nil, err
	}
	r, err := f.openOwn(name)
	if !errors.Is(err, ErrNotFound) {
		return r, err
	}
	if r, err = f.yours.open(ctx, name); errors.Is(err, ErrNotFound) {
		return f.openOwn(name) // it appeared as a file, and was adopted
	}
	return r, err
}

// openOwn opens a pushed tensor.
func (f *Folder) openOwn(name string) (Reader, error) {
	lock := f.nameLock(fileName(name))
	lock.Lock()
	defer lock.Unlock()
	f.mu.Lock()
	p, there := f.pushed.byName[name]
	closed := f.isClosed
	f.mu.Unlock()
	switch {
	case closed:
		return nil, ErrClosed
	case !there:
		return nil, fmt.Errorf("%w: no tensor %q", ErrNotFound, name)
	}
	return f.openPushed(p)
}

// strange returns those of names that are not known files of pushed tensors. There may be
// thousands of names, and each push causes a scan. It reuses names' memory.
func (f *Folder) strange(names []string) []string {
	left := names[:0]
	for some := range slices.Chunk(names, pageNames) {
		f.mu.Lock()
		for _, name := range some {
			if !f.files[name] {
				left = append(left, name)
			}
		}
		f.mu.Unlock()
	}
	return left
}

// adopt adds a pushed tensor that an earlier store left behind. The caller holds the name's
// lock.
func (f *Folder) adopt(file string, info Info, bytes int64) {
	p := &pushed{info: info, file: file}
	p.init(func() { f.used.Add(-bytes) })
	f.mu.Lock()
	defer f.mu.Unlock()
	f.used.Add(bytes)
	f.files[file] = true
	f.pushed.put(info.Name, p)
}

// tellHidden logs which of these tensors of files are hidden by pushed tensors.
func (f *Folder) tellHidden(names []string) {
	f.mu.Lock()
	hidden := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return f.pushed.byName[name] == nil })
	f.mu.Unlock()
	if len(hidden) > 0 {
		f.config.Log.Warn("tensors of files are hidden by pushed tensors of the same names", slog.String("first", hidden[0]), slog.Int("tensors", len(hidden)))
	}
}

// openPushed maps p's file, or shares the mapping of another Reader. The caller holds the
// name's lock, so the file is p's.
func (f *Folder) openPushed(p *pushed) (Reader, error) {
	if p.mapped != nil && p.mapped.tryRetain() {
		return newReader(f.yours.pool, p.info, p.mapped)
	}
	st, err := tensorfile.OpenSafetensors(filepath.Join(f.dir, p.file))
	if errors.Is(err, fs.ErrNotExist) {
		f.config.Log.Warn("file of a pushed tensor was deleted by another program", slog.String("tensor", p.info.Name), slog.String("file", p.file))
		f.forget(p)
		return nil, fmt.Errorf("%w: no tensor %q: its file was deleted", ErrNotFound, p.info.Name)
	}
	if err != nil {
		return nil, fmt.Errorf("store: tensor %q: %w", p.info.Name, err)
	}
	p.retain()
	m := &mapped{file: st}
	m.init(func() {
		_ = st.Close() // unmapping does not fail
		p.Release()
	})
	r, err := newReader(f.yours.pool, p.info, m)
	if err == nil {
		p.mapped = m
	}
	return r, err
}

// forget removes a pushed tensor. The caller holds the name's lock.
func (f *Folder) forget(p *pushed) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pushed.remove(p.info.Name)
	delete(f.files, p.file)
	p.Release()
}

// List implements Store. It first checks for new and removed files.
func (f *Folder) List(ctx context.Context, glob, after string, most int) ([]Info, error) {
	if err := f.yours.rescan(false); err != nil {
		return nil, err
	}
	return listPages(ctx, glob, after, most, func(after string, n int) ([]Info, error) {
		var infos []Info // pushed ones hide parts
		f.mu.Lock()
		for _, name := range f.pushed.after(after, n) {
			infos = append(infos, f.pushed.byName[name].info)
		}
		f.mu.Unlock()
		parts, err := f.yours.after(after, n)
		return merge(n, infos, parts), err
	})
}

// Delete implements Store. One fsync makes all deletions durable.
func (f *Folder) Delete(ctx context.Context, names ...string) (deleted []string, err error) {
	for _, name := range names {
		if err = context.Cause(ctx); err != nil {
			break
		}
		var there bool
		if there, err = f.delete(name); err != nil {
			break
		}
		if there {
			deleted = append(deleted, name)
		}
	}
	if len(deleted) == 0 {
		return nil, err
	}
	if e := f.syncNames(f.dir); e != nil {
		err = errors.Join(err, fmt.Errorf("store: %d tensors, the first of which is %q, are deleted but may come back after a power failure: %w", len(deleted), deleted[0], e))
	}
	return deleted, err
}

// delete deletes the file of a pushed tensor, if it exists.
func (f *Folder) delete(name string) (there bool, err error) {
	lock := f.nameLock(fileName(name))
	lock.Lock()
	defer lock.Unlock()
	if err := f.usable(); err != nil {
		return false, err
	}
	f.mu.Lock()
	p, isPushed := f.pushed.byName[name]
	f.mu.Unlock()
	if !isPushed {
		if p, isPart := f.yours.find(name); isPart {
			return false, partOf(p.info)
		}
		return false, nil
	}
	if err := os.Remove(filepath.Join(f.dir, p.file)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, changing("delete", name, err)
	}
	f.forget(p)
	return true, nil
}

// Close implements Store. It unlocks the folder.
func (f *Folder) Close() error {
	if err := f.yours.close(); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.isClosed = true
	return f.lock.Close()
}

// Used implements Meter: the files of pushed tensors count, with their headers.
func (f *Folder) Used() (used, limit int64) { return f.used.Load(), f.config.Limit }

// newReader returns a Reader of a pushed tensor. It takes over the caller's hold on the
// file, even if it fails.
func newReader(pool *slab.Pool, info Info, file *mapped) (Reader, error) {
	return (&fileReader{pool: pool, info: info, file: file}).open(pushedEntry)
}

// folderWriter writes one tensor to a folder.
type folderWriter struct {
	folder  *Folder
	made    *pushed // nil after the end
	size    int64
	begin   int64 // offset of the tensor in its file: the header's length
	temp    string
	file    *os.File
	order   codec.OrderedDigester
	started int64 // bytes whose write-back was started
}

func (w *folderWriter) WriteViews(_ context.Context, off int64, views [][]byte) error {
	if err := checkViews(off, views, w.size); err != nil {
		return err
	}
	if err := writeViews(w.file, w.begin+off, views); err != nil {
		return w.failed("write", err)
	}
	for _, v := range views {
		w.order.Wrote(off, v)
		off += int64(len(v))
	}
	if n := (w.order.Next() - w.started) / writeBack * writeBack; n > 0 {
		startWriteBack(w.file, w.begin+w.started, n)
		w.started += n
	}
	return nil
}

// Commit makes the file durable, then its name, and only then adds it to the index.
func (w *folderWriter) Commit(context.Context) (Info, error) {
	defer w.Abort()
	p, f := w.made, w.folder
	if err := w.seal(); err != nil {
		return Info{}, w.failed("finish", err)
	}
	lock := f.nameLock(p.file)
	lock.Lock()
	defer lock.Unlock()
	if err := f.usable(); err != nil {
		return Info{}, err
	}
	if err := os.Rename(w.temp, filepath.Join(f.dir, p.file)); err != nil {
		return Info{}, w.failed("name", err)
	}
	syncErr := f.syncNames(f.dir)
	f.mu.Lock()
	defer f.mu.Unlock()
	if old, replaced := f.pushed.put(p.info.Name, p); replaced {
		old.Release()
	}
	f.files[p.file] = true
	w.made = nil
	f.writers--
	if syncErr != nil { // the older tensor is gone
		return p.info.clone(), fmt.Errorf("store: tensor %q is stored, but may not survive a power failure: %w", p.info.Name, syncErr)
	}
	return p.info.clone(), nil
}

// seal writes the header, which completes the file, and waits for the disk.
func (w *folderWriter) seal() error {
	if err := w.order.ReadRest(io.NewSectionReader(w.file, w.begin, w.size), w.size); err != nil {
		return err
	}
	info := &w.made.info
	info.Digest, info.Stored = w.order.Sum(), time.Now().UTC()
	header, err := pushedHeader(*info)
	if err != nil {
		return err
	}
	if _, err := w.file.WriteAt(header, 0); err != nil {
		return err
	}
	if err := w.file.Sync(); err != nil {
		return err
	}
	file := w.file
	w.file = nil
	return file.Close()
}

func (w *folderWriter) Abort() {
	if w.made == nil {
		return
	}
	if w.file != nil {
		_ = w.file.Close() // its contents are discarded
	}
	_ = os.Remove(w.temp) // if this fails, the next OpenFolder removes it
	w.made.Release()
	w.made = nil
	w.folder.mu.Lock()
	defer w.folder.mu.Unlock()
	w.folder.writers--
}

// failed returns the error of a failed operation, which wraps ErrFull if the disk is full.
func (w *folderWriter) failed(what string, err error) error {
	name, n := w.made.info.Name, w.begin+w.size
	var errno syscall.Errno
	errors.As(err, &errno)
	if errno == syscall.ENOSPC || errno == syscall.EDQUOT || errno == syscall.EFBIG { // without the path: peers read this
		return fmt.Errorf("%w: %s tensor %q: not enough disk space for %d bytes: %w", ErrFull, what, name, n, errno)
	}
	return changing(what, name, err)
}

// changing returns the error of a change to the folder, which wraps ErrUnwritable if other
// changes would fail, too.
func changing(what, name string, err error) error {
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) || errors.Is(err, syscall.EIO) {
		return fmt.Errorf("%w: %s tensor %q: %w", ErrUnwritable, what, name, err)
	}
	return fmt.Errorf("store: %s tensor %q: %w", what, name, err)
}
