package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
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

// files are the model files that others have put into a folder. It never writes to the
// folder.
type files struct {
	dir    string
	prefix string  // prefix of all names
	deep   bool    // include the folders below
	owner  *Folder // keeps pushed tensors in the same folder; may be nil
	log    *slog.Logger
	pool   *slab.Pool // for views
	limit  int        // of tensors in all files: fileTensors, except in tests

	scanning sync.Mutex // guards scan; taken before a lock of a Folder's names and before mu
	scan     scan
	scans    atomic.Int64 // scans begun

	mu       sync.Mutex // guards all below; taken last
	parts    index[part]
	isClosed bool
}

// part is a tensor of a model file, or the file's document.
type part struct {
	info     Info
	name     string // within the file
	document []byte // set if it is the document
	whole    *wholeFile
}

// scan is what was last seen in the folder.
type scan struct {
	dirs    map[string]dirTime // of the folders
	settled bool               // a later change will change dirs
	files   map[string]*wholeFile
}

// dirTime is a folder's modification time. Both are zero if the folder cannot be read.
type dirTime struct {
	at    time.Time // may be in the future
	since time.Time // when the folder is known to have had it; never in the future
}

// wholeFile is a model file in the folder. files holds it for as long as it knows its
// parts.
type wholeFile struct {
	paths   []string      // of the file, or of all files of a model
	seen    []fs.FileInfo // their state when last seen; nil if missing
	tensors int           // in the file; 0 if it is damaged
	mapped  *mapped       // nil if the file cannot be used
}

func (w *wholeFile) usable() bool { return w != nil && w.mapped != nil }

// mapped is a mapped file. It is unmapped when nobody holds it any more.
type mapped struct {
	share
	file *tensorfile.Safetensors
}

func newFiles(dir string, log *slog.Logger) *files {
	f := &files{dir: dir, log: log, limit: fileTensors, pool: slab.NewPool(viewBytes, slab.System), parts: newIndex(map[string]part{})}
	f.scan.files = map[string]*wholeFile{}
	return f
}

// stats returns the FileInfos of files; nil for a file that does not exist or is not
// regular.
func stats(paths []string) []fs.FileInfo {
	infos := make([]fs.FileInfo, len(paths))
	for i, path := range paths {
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() { // Stat follows links
			infos[i] = info
		}
	}
	return infos
}

// same reports whether a file has not been replaced or modified since it was seen.
func same(seen, now fs.FileInfo) bool {
	if seen == nil || now == nil {
		return seen == nil && now == nil
	}
	return os.SameFile(seen, now) && seen.Size() == now.Size() && seen.ModTime().Equal(now.ModTime())
}

// asItWas reports whether the file is unchanged since it was seen.
func (w *wholeFile) asItWas() bool { return slices.EqualFunc(w.seen, stats(w.paths), same) }

// rescan looks for new, changed and removed files. Concurrent callers share a scan that
// began after they called. With always, it scans even if the times of the folders have not
// changed: a file may have been modified.
func (f *files) rescan(always bool) error {
	before := f.scans.Load()
	f.scanning.Lock()
	defer f.scanning.Unlock()
	if f.scan.files == nil {
		return ErrClosed
	}
	if f.scans.Load() > before {
		return nil
	}
	if f.owner != nil {
		if err := f.owner.isHere(); err != nil {
			return err
		}
	}
	if !always && f.scan.settled && f.dirsAsTheyWere() && !f.brokenOnesChanged() {
		return nil
	}
	f.scans.Add(1)
	dirs, found, err := f.walk()
	if err != nil {
		return err
	}
	settled := true
	for path, dir := range dirs {
		if old, known := f.scan.dirs[path]; known && old.at.Equal(dir.at) {
			dir.since = old.since
			dirs[path] = dir
		}
		settled = settled && time.Since(dir.since) > clockGrain
	}
	err = f.look(found)
	f.scan.settled, f.scan.dirs = settled && err == nil, dirs
	return err
}

func (f *files) dirsAsTheyWere() bool {
	for path, dir := range f.scan.dirs {
		if dir.at.IsZero() { // its permissions may change, which its time does not show
			if _, _, err := readDir(path); err == nil || errors.Is(err, fs.ErrNotExist) {
				return false
			}
		} else if now, err := os.Stat(path); err != nil || !now.ModTime().Equal(dir.at) {
			return false
		}
	}
	return true
}

// brokenOnesChanged reports whether an unusable file has changed: it may have been seen
// while it was being copied, and only the beginning of the copy changes the folder's time.
func (f *files) brokenOnesChanged() bool {
	for _, w := range f.scan.files {
		if !w.usable() && !w.asItWas() {
			return true
		}
	}
	return false
}

// walk returns the folders with their times, and the paths of the model files in them,
// relative to the folder, without those that belong to an index.
func (f *files) walk() (dirs map[string]dirTime, found []string, err error) {
	dirs = map[string]dirTime{}
	pending := []string{"."}
	for len(pending) > 0 {
		dir := pending[0]
		pending = pending[1:]
		path := filepath.Join(f.dir, dir)
		info, entries, err := readDir(path)
		if err != nil && dir != "." {
			if _, known := f.scan.dirs[path]; !known {
				f.log.Warn("folder cannot be read", slog.String("folder", dir), slog.Any("error", err))
			}
			dirs[path] = dirTime{}
			continue
		}
		if err != nil {
			return nil, nil, f.away(err)
		}
		at, since := info.ModTime(), time.Now()
		if at.Before(since) {
			since = at
		}
		dirs[path] = dirTime{at, since}
		sub, files := f.sort(dir, entries)
		pending = append(pending, sub...)
		found = append(found, files...)
	}
	return dirs, found, nil
}

// readDir reads a folder in directory order: it may hold thousands of pushed tensors.
func readDir(path string) (info fs.FileInfo, entries []fs.DirEntry, err error) {
	dir, err := os.Open(path)
	if err != nil {
		return nil, nil, err
	}
	if info, err = dir.Stat(); err == nil {
		entries, err = dir.ReadDir(-1)
	}
	return info, entries, errors.Join(err, dir.Close())
}

// away returns the error for a folder that cannot be read.
func (f *files) away(err error) error {
	if f.owner != nil || errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) {
		return fmt.Errorf("store: %w", err)
	}
	return fmt.Errorf("%w: %w", ErrUnavailable, err)
}

// sort separates the subfolders of a folder from the model files.
func (f *files) sort(dir string, entries []fs.DirEntry) (sub, found []string) {
	var names []string
	for _, e := range entries {
		switch name := e.Name(); {
		case strings.HasPrefix(name, "."):
		case e.IsDir() && f.deep:
			sub = append(sub, filepath.Join(dir, name))
		case !e.IsDir() && (strings.HasSuffix(name, tensorfile.FileSuffix) || strings.HasSuffix(name, tensorfile.IndexSuffix)):
			names = append(names, name)
		}
	}
	if f.owner != nil {
		names = f.owner.strange(names)
	}
	shards := map[string]bool{}
	for _, name := range names {
		if strings.HasSuffix(name, tensorfile.IndexSuffix) {
			for _, path := range tensorfile.PathsOf(filepath.Join(f.dir, dir, name))[1:] {
				shards[filepath.Base(path)] = true
			}
		}
	}
	for _, name := range names {
		if !shards[name] {
			found = append(found, filepath.Join(dir, name))
		}
	}
	return sub, found
}

// look reads the headers of new and changed files.
func (f *files) look(found []string) (err error) {
	there := map[string]bool{}
	var gone []*wholeFile
	changed := false
	room := f.limit
	slices.Sort(found) // so that the same files have room after a restart
	for _, name := range found {
		old := f.scan.files[name]
		now, e := f.lookAt(name, old, room)
		if e != nil {
			err, now = fmt.Errorf("store: %w", e), old
		}
		if now == nil {
			continue
		}
		there[name] = true
		if now.usable() {
			room = max(room-now.tensors, 0)
		}
		if now != old {
			f.scan.files[name] = now
			gone = append(gone, old)
			changed = changed || now.usable() || old.usable()
		}
	}
	for name, w := range f.scan.files {
		if !there[name] {
			delete(f.scan.files, name)
			gone = append(gone, w)
			changed = changed || w.usable()
		}
	}
	if changed {
		f.showParts()
	}
	for _, w := range gone { // now that nobody can find their tensors
		if w.usable() {
			w.mapped.Release()
		}
	}
	return err
}

// lookAt returns the file of this name, which is old if it has not changed. It returns nil
// if there is none, or if the file is a pushed tensor, which its owner adopts if it is new.
// The file is not usable if it has more tensors than there is room for. An error means that
// this process cannot open files now.
func (f *files) lookAt(name string, old *wholeFile, room int) (*wholeFile, error) {
	isPushed := f.owner != nil && isPushedName(name)
	if isPushed {
		lock := f.owner.nameLock(name) // not between the rename of a Commit and its end
		lock.Lock()
		defer lock.Unlock()
		if len(f.owner.strange([]string{name})) == 0 {
			return nil, nil
		}
	}
	path := filepath.Join(f.dir, name)
	w := &wholeFile{paths: tensorfile.PathsOf(path)}
	if w.seen = stats(w.paths); w.seen[0] == nil {
		return nil, nil
	}
	if old != nil && slices.Equal(old.paths, w.paths) && slices.EqualFunc(old.seen, w.seen, same) &&
		(old.tensors == 0 || old.usable() == (old.tensors <= room)) {
		return old, nil
	}
	st, err := tensorfile.OpenModel(path)
	if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) {
		return nil, err
	}
	if err == nil && isPushed {
		var info Info
		if info, err = pushedInfo(name, st); err == nil {
			_ = st.Close() // unmapping what was mapped does not fail
			f.owner.adopt(name, info, w.seen[0].Size())
			return nil, nil
		}
		if errors.Is(err, errForeign) {
			err = nil // an ordinary file in spite of its name
		} else {
			_ = st.Close()
		}
	}
	if err == nil {
		if w.tensors = len(st.Names()); w.tensors > room {
			_ = st.Close()
			err = fmt.Errorf("%w: its %d tensors are too many: all files in the folder may have %d", ErrFull, w.tensors, f.limit)
		}
	}
	if err != nil {
		if old == nil || old.usable() { // log it once, however often it changes
			f.log.Warn("file cannot be used", slog.String("file", name), slog.Any("error", err))
		}
		return w, nil
	}
	w.mapped = &mapped{file: st}
	w.mapped.init(func() { _ = st.Close() })
	return w, nil
}

// stem returns the prefix of the names of a file's tensors: its path without the suffix.
func (f *files) stem(file string) string {
	return f.prefix + filepath.ToSlash(strings.TrimSuffix(strings.TrimSuffix(file, tensorfile.IndexSuffix), tensorfile.FileSuffix)) + "/"
}

// showParts rebuilds the index of the tensors of all files.
func (f *files) showParts() {
	parts := map[string]part{}
	for _, file := range slices.Sorted(maps.Keys(f.scan.files)) {
		if w := f.scan.files[file]; w.usable() {
			f.showFile(parts, file, w)
		}
	}
	x := newIndex(parts)
	if f.owner != nil {
		f.owner.tellHidden(x.names)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for name, p := range parts {
		if old, ok := f.parts.byName[name]; ok && old.whole == p.whole { // the digest from Digested is still valid
			p.info.Digest = old.info.Digest
			parts[name] = p
		}
	}
	f.parts = x
}

// showFile adds the tensors of a file to parts.
func (f *files) showFile(parts map[string]part, file string, w *wholeFile) {
	var spoiled error
	var first string
	unusable := 0
	add := func(p part, err error) {
		p.info.Name = f.stem(file) + p.name
		p.info.Stored, p.info.Durable, p.info.File, p.whole = w.seen[0].ModTime(), true, filepath.ToSlash(file), w
		if _, twice := parts[p.info.Name]; twice && err == nil {
			err = fmt.Errorf("%w: %q is also a tensor of another file", ErrExists, p.info.Name)
		}
		if err = errors.Join(err, CheckName(p.info.Name)); err == nil {
			parts[p.info.Name] = p
			return
		}
		if unusable++; unusable == 1 {
			first, spoiled = p.name, err
		}
	}
	for _, name := range w.mapped.file.Names() {
		d, err := w.mapped.file.Desc(name)
		add(part{info: Info{Desc: d}, name: name}, err)
	}
	if text := w.mapped.file.Document().Encode(); text != nil {
		d := tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{int64(len(text))}}
		add(part{info: Info{Desc: d}, name: tensorfile.MetadataName, document: text}, nil)
	}
	if unusable > 0 {
		f.log.Warn("tensors of a file cannot be used", slog.String("file", file), slog.Int("tensors", unusable),
			slog.String("first", first), slog.Any("error", spoiled))
	}
}

// find returns what is known about a tensor.
func (f *files) find(name string) (part, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p, ok := f.parts.byName[name]
	return p, ok
}

// after returns the Infos of up to n tensors whose names come after name.
func (f *files) after(name string, n int) ([]Info, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.isClosed {
		return nil, ErrClosed
	}
	names := f.parts.after(name, n)
	infos := make([]Info, len(names))
	for i, name := range names {
		infos[i] = f.parts.byName[name].info
	}
	return infos, nil
}

// errChanged says that a file has changed since it was seen.
var errChanged = errors.New("store: file has changed")

// open opens a tensor. If the tensor is not known, or its file has changed since it was
// seen, it scans first.
func (f *files) open(ctx context.Context, name string) (Reader, error) {
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

// openKnown opens a known tensor. It returns errChanged if the file has changed since it
// was seen, unless fresh says that a scan has just ended: then it opens whatever the file
// has become.
func (f *files) openKnown(name string, fresh bool) (Reader, error) {
	f.mu.Lock()
	p, there := f.parts.byName[name]
	if there {
		p.whole.mapped.retain() // files holds it, under mu
	}
	closed := f.isClosed
	f.mu.Unlock()
	switch {
	case closed:
		return nil, ErrClosed
	case !there:
		return nil, fmt.Errorf("%w: no tensor %q", ErrNotFound, name)
	case !p.whole.asItWas():
		if !fresh {
			p.whole.mapped.Release()
			return nil, fmt.Errorf("%w: %s", errChanged, p.info.File)
		}
		p.info.Digest = codec.Digest{} // the old digest is of the old file
	}
	return (&fileReader{pool: f.pool, info: p.info, data: p.document, file: p.whole.mapped, files: f}).open(p.name)
}

// close closes the files. What Readers hold stays valid.
func (f *files) close() error {
	f.scanning.Lock()
	defer f.scanning.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.isClosed {
		return ErrClosed
	}
	f.isClosed = true
	f.parts = newIndex(map[string]part{})
	for _, w := range f.scan.files {
		if w.usable() {
			w.mapped.Release()
		}
	}
	f.scan.files = nil
	return nil
}
