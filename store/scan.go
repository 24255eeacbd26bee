package store

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
	"syscall"
	"time"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

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
func (f *Files) rescan(always bool) error {
	before := f.scans.Load()
	f.scanning.Lock()
	defer f.scanning.Unlock()
	if f.scan.files == nil {
		return ErrClosed
	}
	if f.scans.Load() > before {
		return nil
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

func (f *Files) dirsAsTheyWere() bool {
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
func (f *Files) brokenOnesChanged() bool {
	for _, w := range f.scan.files {
		if !w.usable() && !w.asItWas() {
			return true
		}
	}
	return false
}

// walk returns the folders with their times, and the paths of the model files in them,
// relative to the folder, without those that belong to an index.
func (f *Files) walk() (dirs map[string]dirTime, found []string, err error) {
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
func (f *Files) away(err error) error {
	if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) {
		return fmt.Errorf("store: %w", err)
	}
	return fmt.Errorf("%w: %w", ErrUnavailable, err)
}

// sort separates the subfolders of a folder from the model files.
func (f *Files) sort(dir string, entries []fs.DirEntry) (sub, found []string) {
	var names []string
	for _, e := range entries {
		switch name := e.Name(); {
		case strings.HasPrefix(name, "."):
		case e.IsDir() && f.owned == nil:
			sub = append(sub, filepath.Join(dir, name))
		case f.owned != nil && f.owned(name):
		case !e.IsDir() && (strings.HasSuffix(name, tensorfile.FileSuffix) || strings.HasSuffix(name, tensorfile.IndexSuffix)):
			names = append(names, name)
		}
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
func (f *Files) look(found []string) (err error) {
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

// lookAt returns the file of this name, which is old if it has not changed, or nil if there
// is none. The file is not usable if it has more tensors than there is room for. An error means that
// this process cannot open files now.
func (f *Files) lookAt(name string, old *wholeFile, room int) (*wholeFile, error) {
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
func (f *Files) stem(file string) string {
	return f.prefix + filepath.ToSlash(strings.TrimSuffix(strings.TrimSuffix(file, tensorfile.IndexSuffix), tensorfile.FileSuffix)) + "/"
}

// showParts rebuilds the index of the tensors of all files.
func (f *Files) showParts() {
	parts := map[string]part{}
	for _, file := range slices.Sorted(maps.Keys(f.scan.files)) {
		if w := f.scan.files[file]; w.usable() {
			f.showFile(parts, file, w)
		}
	}
	names := slices.Sorted(maps.Keys(parts)) // not under mu: there may be many
	f.mu.Lock()
	defer f.mu.Unlock()
	for name, p := range parts {
		if old, ok := f.byName[name]; ok && old.whole == p.whole { // the digest from Digested is still valid
			p.info.Digest = old.info.Digest
			parts[name] = p
		}
	}
	f.byName, f.names = parts, names
}

// showFile adds the tensors of a file to parts.
func (f *Files) showFile(parts map[string]part, file string, w *wholeFile) {
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

// known returns the Info of a tensor of which it is known that it is, or was, in a file.
func (f *Files) known(name string) (Info, bool, error) {
	p, there := f.find(name)
	if there && !p.whole.asItWas() {
		if err := f.rescan(true); err != nil {
			return Info{}, false, err
		}
		p, there = f.find(name)
	}
	return p.info, there, nil
}

// errChanged says that a file has changed since it was seen.
var errChanged = errors.New("store: file has changed")

// openKnown opens a known tensor. It returns errChanged if the file has changed since it
// was seen, unless fresh says that a scan has just ended: then it opens whatever the file
// has become.
func (f *Files) openKnown(name string, fresh bool) (Reader, error) {
	p, err := f.open(name, func(p part) { p.whole.mapped.retain() }) // files holds it, under mu
	if err != nil {
		return nil, err
	}
	if !p.whole.asItWas() {
		if !fresh {
			p.whole.mapped.Release()
			return nil, fmt.Errorf("%w: %s", errChanged, p.info.File)
		}
		p.info.Digest = codec.Digest{} // the old digest is of the old file
	}
	return (&fileReader{pool: f.pool, info: p.info, data: p.document, file: p.whole.mapped, files: f}).open(p.name)
}
