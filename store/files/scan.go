package files

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/shelf"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// part is a tensor of a model file, or the file's document.
type part struct {
	info     store.Info // the lock of the index guards its digest; the rest does not change
	name     string     // within the file
	document []byte     // set if it is the document
	whole    *wholeFile
}

func (p *part) About() *store.Info { return &p.info }

// scan is what was last seen in the folder.
type scan struct {
	dirs    map[string]time.Time // modification times of the folders; zero if one cannot be read
	since   time.Time            // when dirs were first as they are
	settled bool                 // a later change will change dirs
	files   map[string]*wholeFile
}

// wholeFile is a model file in the folder. files holds it for as long as it knows its
// parts.
type wholeFile struct {
	paths   []string      // of the file, or of all files of a model
	seen    []fs.FileInfo // their state when last seen; nil if missing
	tensors int           // in the file; 0 if it is damaged
	parts   []*part       // its tensors that can be used
	mapped  *shelf.Mapped // nil if the file cannot be used
}

func (w *wholeFile) usable() bool { return w != nil && w.mapped != nil }

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

// sameFile reports whether a file has not been replaced or modified since it was seen.
func sameFile(seen, now fs.FileInfo) bool {
	if seen == nil || now == nil {
		return seen == nil && now == nil
	}
	return os.SameFile(seen, now) && seen.Size() == now.Size() && seen.ModTime().Equal(now.ModTime())
}

// isUnchanged reports whether the file is unchanged since it was seen.
func (w *wholeFile) isUnchanged() bool { return slices.EqualFunc(w.seen, stats(w.paths), sameFile) }

// rescan looks for new, changed and removed files. Concurrent callers share a scan that
// began after they called. With always, it scans even if the times of the folders have not
// changed: a file may have been modified.
func (f *Store) rescan(always bool) error {
	before := f.scans.Load()
	f.scanning.Lock()
	defer f.scanning.Unlock()
	if f.scan.files == nil {
		return store.ErrClosed
	}
	if f.scans.Load() > before {
		return nil
	}
	if !always && f.scan.settled && f.foldersUnchanged() {
		return nil
	}
	f.scans.Add(1)
	began := time.Now()
	dirs, found, err := f.walk()
	if err != nil {
		return err
	}
	if !maps.EqualFunc(dirs, f.scan.dirs, time.Time.Equal) {
		f.scan.since = time.Now()
	}
	err = f.readHeaders(found)
	f.scan.settled, f.scan.dirs = err == nil && began.Sub(f.scan.since) > clockGrain, dirs
	return err
}

// foldersUnchanged reports whether the folders are as they were, and the files that cannot be used:
// one may have been seen while it was being copied, and only the beginning of the copy
// changes the folder's time.
func (f *Store) foldersUnchanged() bool {
	for path, at := range f.scan.dirs {
		if at.IsZero() { // its permissions may change, which its time does not show
			if _, err := os.ReadDir(path); err == nil {
				return false
			}
		} else if now, err := os.Stat(path); err != nil || !now.ModTime().Equal(at) {
			return false
		}
	}
	for _, w := range f.scan.files {
		if !w.usable() && !w.isUnchanged() {
			return false
		}
	}
	return true
}

// walk returns the folders with their times, and the paths of the model files in them,
// relative to the folder, without those that belong to an index.
func (f *Store) walk() (dirs map[string]time.Time, found []string, err error) {
	dirs, shards := map[string]time.Time{}, map[string]bool{}
	err = filepath.WalkDir(f.dir, func(path string, e fs.DirEntry, err error) error {
		switch {
		case shelf.OutOfFiles(err):
			return fmt.Errorf("store: %w", err)
		case err != nil && path == f.dir:
			return fmt.Errorf("%w: %w", store.ErrUnavailable, err)
		case err != nil:
			if _, known := f.scan.dirs[path]; !known {
				f.config.Log.Warn("folder cannot be read", slog.String("folder", f.relative(path)), slog.Any("error", err))
			}
			dirs[path] = time.Time{}
		case e.IsDir() && path != f.dir && (f.config.Flat || strings.HasPrefix(e.Name(), ".")):
			return fs.SkipDir
		case e.IsDir():
			if info, err := e.Info(); err == nil { // of before it is read
				dirs[path] = info.ModTime()
			}
		case strings.HasPrefix(e.Name(), "."), f.config.Skip != nil && f.config.Skip(e.Name()):
		case strings.HasSuffix(path, tensorfile.FileSuffix), strings.HasSuffix(path, tensorfile.IndexSuffix):
			found = append(found, f.relative(path))
			for _, shard := range tensorfile.PathsOf(path)[1:] {
				shards[f.relative(shard)] = true
			}
		}
		return nil
	})
	return dirs, slices.DeleteFunc(found, func(path string) bool { return shards[path] }), err
}

// relative returns a path below the folder relative to it.
func (f *Store) relative(path string) string {
	return strings.TrimPrefix(path[len(f.dir):], string(filepath.Separator))
}

// readHeaders reads the headers of new and changed files.
func (f *Store) readHeaders(found []string) (err error) {
	old, files := f.scan.files, map[string]*wholeFile{}
	room := f.limit
	slices.Sort(found) // so that the same files have room after a restart
	for _, name := range found {
		w, e := f.readHeader(name, old[name], room)
		if e != nil {
			err = fmt.Errorf("store: %w", e)
		}
		if w.usable() {
			room = max(room-w.tensors, 0)
		}
		if w != nil {
			files[name] = w
		}
	}
	f.scan.files = files
	if !maps.Equal(old, files) {
		f.rebuildIndex()
	}
	for name, w := range old { // now that nobody can find its tensors
		if w.usable() && files[name] != w {
			w.mapped.Release()
		}
	}
	return err
}

// readHeader returns the file of this name, which is old if it has not changed, or nil if there
// is none. The file is not usable if it has more tensors than there is room for. An error
// means that this process cannot open files now; the file is then old.
func (f *Store) readHeader(name string, old *wholeFile, room int) (*wholeFile, error) {
	path := filepath.Join(f.dir, name)
	w := &wholeFile{paths: tensorfile.PathsOf(path)}
	if w.seen = stats(w.paths); w.seen[0] == nil {
		return nil, nil
	}
	if old != nil && slices.Equal(old.paths, w.paths) && slices.EqualFunc(old.seen, w.seen, sameFile) &&
		(old.tensors == 0 || old.usable() == (old.tensors <= room)) {
		return old, nil
	}
	st, err := tensorfile.OpenModel(path)
	if shelf.OutOfFiles(err) {
		return old, err
	}
	if err == nil {
		if w.tensors = len(st.Names()); w.tensors > room {
			_ = st.Close()
			err = fmt.Errorf("%w: its %d tensors are too many: all files in the folder may have %d", store.ErrFull, w.tensors, f.limit)
		}
	}
	if err != nil {
		if old == nil || old.usable() { // log it once, however often it changes
			f.config.Log.Warn("file cannot be used", slog.String("file", name), slog.Any("error", err))
		}
		return w, nil
	}
	w.mapped = shelf.NewMapped(st, func() {})
	f.addParts(name, w, st)
	return w, nil
}

// addParts finds the parts of a file.
func (f *Store) addParts(file string, w *wholeFile, st *tensorfile.Safetensors) {
	path := filepath.ToSlash(file)
	stem := f.prefix + strings.TrimSuffix(strings.TrimSuffix(path, tensorfile.IndexSuffix), tensorfile.FileSuffix) + "/"
	var spoiled error
	var first string
	unusable := 0
	add := func(name string, d tensor.Desc, document []byte, err error) {
		info := store.Info{Name: stem + name, Desc: d, Stored: w.seen[0].ModTime(), Durable: true, File: path}
		if err = errors.Join(err, store.CheckNew(info.Name)); err == nil {
			w.parts = append(w.parts, &part{info, name, document, w})
			return
		}
		if unusable++; unusable == 1 {
			first, spoiled = name, err
		}
	}
	for _, name := range st.Names() {
		d, err := st.Desc(name)
		add(name, d, nil, err)
	}
	if text := st.Document().Encode(); text != nil {
		add(tensorfile.MetadataName, tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{int64(len(text))}}, text, nil)
	}
	if unusable > 0 {
		f.config.Log.Warn("tensors of a file cannot be used", slog.String("file", file), slog.Int("tensors", unusable),
			slog.String("first", first), slog.Any("error", spoiled))
	}
}

// rebuildIndex rebuilds the index of the tensors of all files. If several have a name, the
// first file has it.
func (f *Store) rebuildIndex() {
	parts := map[string]*part{}
	for _, file := range slices.Sorted(maps.Keys(f.scan.files)) {
		w, before := f.scan.files[file], len(parts)
		for _, p := range w.parts {
			if _, taken := parts[p.info.Name]; !taken {
				parts[p.info.Name] = p
			}
		}
		if hidden := before + len(w.parts) - len(parts); hidden > 0 {
			f.config.Log.Warn("tensors of a file have the names of another file's", slog.String("file", file), slog.Int("tensors", hidden))
		}
	}
	f.index.Reset(parts)
}

// fileOf returns the file that a tensor is part of, empty if there is none. It does not
// look for new files, which each push of many would.
func (f *Store) fileOf(name string) (string, error) {
	p, known := f.index.Find(name)
	if known && !p.whole.isUnchanged() {
		if err := f.rescan(true); err != nil {
			return "", err
		}
		p, known = f.index.Find(name)
	}
	if !known {
		return "", nil
	}
	return p.info.File, nil
}

// errChanged says that a file has changed since it was seen.
var errChanged = errors.New("store: file has changed")

// openKnown opens a known tensor. It returns errChanged if the file has changed since it
// was seen, unless fresh says that a scan has just ended: then it opens whatever the file
// has become.
func (f *Store) openKnown(name string, fresh bool) (store.Reader, error) {
	var info store.Info
	p, err := f.index.Open(name, func(p *part) {
		p.whole.mapped.Retain() // files holds it, under the lock of the index
		info = p.info
	})
	if err != nil {
		return nil, err
	}
	if !p.whole.isUnchanged() {
		if !fresh {
			p.whole.mapped.Release()
			return nil, fmt.Errorf("%w: %s", errChanged, info.File)
		}
		info.Digest = codec.Digest{} // the old digest is of the old file
	}
	keep := func(d codec.Digest) { // for as long as the file is the one that was read
		f.index.Lock()
		defer f.index.Unlock()
		p.info.Digest = d
	}
	if p.document != nil {
		return p.whole.mapped.Of(info, p.document, keep), nil
	}
	return p.whole.mapped.Open(info, p.name, keep)
}
